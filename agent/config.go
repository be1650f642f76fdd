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
	StateDir    string       // directory of the journal; one agent at a time
	Socket      string       // of the API
	SelfSocket  string       // of the API for containers
	PolicyDir   string       // holds the policy files, *.yaml
	ImageLabels bool         // labels of images are policy, too
	ViewGroup   string       // group with read-only access, by name or number; if the host lacks it, there is no socket for it
	MetricsAddr string       // address of the metrics page: host:port, or unix:/path
	// MetricsToken is the path of the file with the token that the page requires; empty: none.
	MetricsToken string

	// The addresses of runtimes; empty: the usual ones. Sources, if not nil, replaces the sources
	// at these addresses.
	DockerHost     string // URL of the Engine API
	PodmanHost     string // URL of Podman's Engine API
	ContainerdAddr string // path of containerd's socket; empty: all of discover.ContainerdAddrs
	CRIOAddr       string // path of CRI-O's socket
	Kubeconfig     string // to read the annotations of pods again when they change, or kubernetes.InCluster; empty: a pod keeps those it started with
	NodeName       string // this node's name in the API server; empty: the hostname
	SandboxDir     string // directory of the state files of package sandbox
	KubeletDir     string // kubelet's directory, to offer it what features guarantee; empty: no offers
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

// watch makes the Set of this host's containers, starting with known. ready is discover.Config's.
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
	refresh time.Duration // interval at which features are applied again
	decide  time.Duration // interval at which features are asked for decisions
	view    time.Duration // interval at which the overview is computed
	stop    time.Duration // bound of removing what is in force, and of restoring the journal
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

// rest is the pause after the nth panic in a row for one container, or of one method that reads.
// The first pause is so long that these alone never make the feature unavailable.
func (p pace) rest(n int) time.Duration {
	return p.spread(backoff.Nth(n, panicTime/2, p.refresh))
}
