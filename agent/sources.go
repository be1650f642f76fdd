package agent

import (
	"cmp"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/sandbox"
)

// watch makes the Set of the containers on this host, which starts with what an earlier one knew.
func watch(cfg Config, known *container.Known) *container.Set {
	sources := cfg.Sources
	if sources == nil {
		sources = runtimes(cfg)
	}
	return container.NewSet(container.Config{Proc: cfg.Roots.Proc, Cgroup: cfg.Roots.Cgroup, Known: known, Log: cfg.Log}, sources...)
}

// runtimes returns the sources of an ordinary agent, the best informed first. A runtime that is
// absent costs next to nothing. The cgroup tree is the ground truth, and the only source on a host
// without a runtime.
func runtimes(cfg Config) []container.Source {
	return []container.Source{
		container.Docker(cfg.DockerHost),
		container.Podman(cfg.PodmanHost),
		container.Containerd(cfg.ContainerdAddr),
		sandbox.Source(cfg.Roots.Proc, cmp.Or(cfg.SandboxDir, sandbox.DefaultDir)),
		container.CgroupTree(cfg.Roots.Proc, cfg.Roots.Cgroup),
	}
}
