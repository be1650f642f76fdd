package agent

import (
	"cmp"
	"context"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
)

// watch makes the Set of the containers on this host, which starts with what an earlier one knew.
func watch(cfg Config, known *discover.Known, in parts, doubt func() bool) *discover.Set {
	sources, of := cfg.Sources, pods(cfg)
	if sources == nil {
		sources = runtimes(cfg)
	}
	for _, s := range sources {
		in.add(s.Name(), cfg.Log, doubt)
	}
	for _, s := range of {
		in.add(s.Name(), cfg.Log, doubt)
	}
	looks := in.add("containers", cfg.Log, doubt)
	return discover.NewSet(discover.Config{
		Proc: cfg.Roots.Proc, Cgroup: cfg.Roots.Cgroup, Known: known, Monitor: cfg.Roots.Monitor, Pods: of, Log: cfg.Log,
		Look: func(id container.ID, look func() error) error { return looks.panics.try(place{"look", id}, look) },
		Watch: func(ctx context.Context, source string, run func(context.Context) error, told func(error)) error {
			return in[source].keep(ctx, run, told)
		},
	}, sources...)
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
