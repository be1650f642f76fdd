package agent

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/fairlead-project/fairlead/backoff"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel"
)

// Config is the configuration of an agent. StateDir is required. An empty Socket, SelfSocket,
// PolicyDir or MetricsAddr means none.
type Config struct {
	Roots       kernel.Roots // zero: kernel.Default()
	StateDir    string       // of the journal; one agent at a time
	Socket      string       // of the API
	SelfSocket  string       // of the API for containers
	PolicyDir   string       // its *.yaml are the policy files
	ImageLabels bool         // labels of images are policy, like those of containers
	ViewGroup   string       // of those who may only look, by name or number; a host without it has no socket for them
	MetricsAddr string       // of the metrics page: host:port, or unix:/path
	// MetricsToken is the path of a file with the token that the page asks for; empty: it asks for none.
	MetricsToken string

	// The addresses of runtimes; empty: the usual ones. Sources, if not nil, replaces the sources
	// for these.
	DockerHost     string // URL of the Engine API
	PodmanHost     string // URL of Podman's version of it
	ContainerdAddr string // path of containerd's socket; empty: all of discover.ContainerdAddrs
	CRIOAddr       string // path of CRI-O's socket
	Kubeconfig     string // for the annotations of pods as they read now, or kubernetes.InCluster; empty: those of their start count
	NodeName       string // as the API server knows this node; empty: the host's name
	SandboxDir     string // state files of package sandbox
	KubeletDir     string // of kubelet, which is offered what features guarantee; empty: none is
	Sources        []discover.Source

	FeatureConfig
	RecordConfig

	Version string       // program version in the API
	Log     *slog.Logger // nil: no log

	// Ready is called once, after the first round that saw every container. Alive is called about
	// once a second while the agent works. Nil: not called.
	Ready func()
	Alive func()
}

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

// pace holds the intervals of a worker and of the agent. Tests use their own.
type pace struct {
	call    time.Duration // bound of one call of a feature
	first   time.Duration // wait after the first failure; doubled after each further one
	longest time.Duration // bound of that wait
	refresh time.Duration // how often what is in force is applied again
	decide  time.Duration // how often to ask features for decisions
	view    time.Duration // how often to compute the overview
	stop    time.Duration // for the features to remove what is in force, and for the journal
	now     func() time.Time
	jitter  func() float64 // in [0, 1)
}

// ordinary is the pace of a real agent. A container that is just starting often lacks its
// interfaces for some milliseconds, so the first wait is short.
func ordinary() pace {
	return pace{
		call:    10 * time.Second,
		first:   50 * time.Millisecond,
		longest: time.Minute,
		refresh: 5 * time.Minute,
		decide:  time.Second,
		view:    overviewEvery,
		stop:    15 * time.Second,
		now:     time.Now,
		jitter:  rand.Float64,
	}
}

// spread changes d by up to a fifth at random, so that calls that failed together are not repeated
// together.
func (p pace) spread(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*p.jitter()))
}

func (p pace) backoff(tries int) time.Duration {
	return p.spread(backoff.Nth(tries, p.first, p.longest))
}

// rest is the pause after the nth panic in a row of one container, or of one method that reads. The
// first is long enough that no single one makes the feature unavailable.
func (p pace) rest(n int) time.Duration {
	return p.spread(backoff.Nth(n, panicTime/2, p.refresh))
}
