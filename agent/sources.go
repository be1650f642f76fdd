package agent

import (
	"cmp"
	"context"
	"slices"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
)

// watch makes the Set of the containers on this host, which starts with what an earlier one knew. ready is discover.Config's.
func watch(cfg Config, known *discover.Known, in parts, doubt func() bool, ready func(context.Context, string) error) *discover.Set {
	sources, of := cfg.Sources, pods(cfg)
	if sources != nil {
		ready = nil
	} else {
		sources = runtimes(cfg)
		in.add("nri", cfg.Log, doubt)
	}
	for _, s := range sources {
		in.add(s.Name(), cfg.Log, doubt)
	}
	for _, s := range of {
		in.add(s.Name(), cfg.Log, doubt)
	}
	looks := in.add("containers", cfg.Log, doubt)
	return discover.NewSet(discover.Config{
		Proc: cfg.Roots.Proc, Cgroup: cfg.Roots.Cgroup, Known: known, Monitor: cfg.Roots.Monitor, Pods: of, Log: cfg.Log, Ready: ready,
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

// inForce waits until the container with an id of its runtime is there, and each feature has done what is wanted
// for it, or has failed to. The error is that of ctx.
func (a *Agent) inForce(ctx context.Context, id string) error {
	for {
		changed := a.set.Changed()
		all := a.set.Running()
		if i := slices.IndexFunc(all, func(c container.Container) bool { return c.RuntimeID == id }); i >= 0 {
			a.round()
			for _, w := range a.workers {
				w.settle(ctx, all[i].ID) // a failure is in its status
			}
			return ctx.Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
