package feature

import (
	"log/slog"

	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Host is what a feature is given of the host and of the agent; a part of each feature's Config.
type Host struct {
	Roots   kernel.Roots
	Journal *journal.Journal
	Log     *slog.Logger // nil: no log
	// Identity is the owners of packets, shared by all features. nil: what needs it is unavailable.
	Identity *identity.Identity
	Ends     *hook.Ends
	// Containers are those of the host. nil: there are no reports.
	Containers Containers
	// NetNS is the path of the host's network namespace, which holds the uplinks; "" is that of this
	// process.
	NetNS string
}
