package qdisc

import (
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// FilterHooks are those of a kernel without tcx.
func FilterHooks(find *netdev.Finder, j *journal.Journal) *Hooks {
	return &Hooks{journal: j, find: find, filters: true, held: make(map[journal.Ref]*Attachment)}
}
