package feature

import (
	"log/slog"

	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Host gives a feature access to the host and to the agent. It is part of each feature's Config.
type Host struct {
	Roots   kernel.Roots
	Journal *journal.Journal
	Log     *slog.Logger // nil: no log
	// Identity maps packets to their owners, for all features. nil: features that need it are unavailable.
	Identity *identity.Identity
	Ends     *hook.Ends
	// Containers lists the containers on the host. nil: there are no reports.
	Containers Containers
	// NetNS is the path of the host's network namespace, which holds the uplinks; "" is the namespace of
	// this process.
	NetNS string
}
