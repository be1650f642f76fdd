package agent

import (
	"log/slog"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
)

// Config is what an agent has to be told. StateDir must be given. An empty
// Socket, SelfSocket, PolicyDir or MetricsAddr means that there is none.
type Config struct {
	Roots       kernel.Roots // zero: kernel.Default()
	StateDir    string       // where the journal is; one agent at a time
	Socket      string       // of the API
	SelfSocket  string       // of the API for containers
	PolicyDir   string       // *.yaml in it are the policy files
	MetricsAddr string       // host:port of the metrics page

	// Where runtimes answer; empty: at their usual places. Sources, if not
	// nil, is used in place of what would be made from them.
	DockerHost     string // URL of the Engine API
	PodmanHost     string // URL of Podman's form of it
	ContainerdAddr string // path of containerd's socket
	SandboxDir     string // state files of package sandbox
	Sources        []container.Source

	// MarkMask is the part of the packets' mark, 16 bits in a row, that carries whose
	// a packet is beside its priority; 0: none.
	MarkMask uint32

	FeatureConfig

	Version string       // what the API gives as version of the program
	Log     *slog.Logger // nil: no log

	// Ready is called once, when the first round that saw every container
	// there is has been made; Alive is called again and again while the agent
	// works (about once a second). Nil: not called.
	Ready func()
	Alive func()
}
