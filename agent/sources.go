package agent

import (
	"cmp"

	"github.com/fairlead-project/fairlead/discover"
)

// watch makes the Set of the containers on this host, which starts with what an earlier one knew.
func watch(cfg Config, known *discover.Known) *discover.Set {
	sources := cfg.Sources
	if sources == nil {
		sources = runtimes(cfg)
	}
	return discover.NewSet(discover.Config{Proc: cfg.Roots.Proc, Cgroup: cfg.Roots.Cgroup, Known: known, Monitor: cfg.Roots.Monitor, Pods: pods(cfg), Log: cfg.Log}, sources...)
}

// runtimes returns the sources of an ordinary agent, the best informed first. A runtime that is
// absent costs next to nothing. The cgroup tree is the ground truth, and the only source on a host
// without a runtime.
func runtimes(cfg Config) []discover.Source {
	return []discover.Source{
		discover.Docker(cfg.DockerHost),
		discover.Podman(cfg.PodmanHost),
		discover.Containerd(cfg.ContainerdAddr),
		discover.CRIO(cfg.CRIOAddr),
		discover.Sandboxes(cfg.Roots.Proc, cmp.Or(cfg.SandboxDir, discover.DefaultSandboxes)),
		discover.CgroupTree(cfg.Roots.Proc, cfg.Roots.Cgroup),
	}
}
