package agent

import (
	"log/slog"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
)

// Config is the configuration of an agent. StateDir must be given. An empty
// Socket, SelfSocket, PolicyDir or MetricsAddr means that there is none.
type Config struct {
	Roots       kernel.Roots // zero: kernel.Default()
	StateDir    string       // where the journal is; one agent at a time
	Socket      string       // of the API
	SelfSocket  string       // of the API for containers
	PolicyDir   string       // *.yaml in it are the policy files
	ImageLabels bool         // labels of images are policy, as those of containers are
	MetricsAddr string       // of the metrics page: host:port, or unix:/path

	// The addresses of runtimes; empty: the usual ones. Sources, if not nil,
	// replaces what would be made from them.
	DockerHost     string // URL of the Engine API
	PodmanHost     string // URL of Podman's form of it
	ContainerdAddr string // path of containerd's socket; empty: all of container.ContainerdAddrs
	SandboxDir     string // state files of package sandbox
	Sources        []container.Source

	// MarkMask is the part of the packets' mark, 16 adjacent bits, that carries
	// the owner of a packet besides the priority; 0: none.
	MarkMask uint32

	FeatureConfig

	Version string       // what the API gives as version of the program
	Log     *slog.Logger // nil: no log

	// Ready is called once, when the first round that saw every container is
	// done. Alive is called about once a second while the agent works. Nil: not
	// called.
	Ready func()
	Alive func()
}
