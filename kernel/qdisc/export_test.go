package qdisc

import (
	"encoding/binary"
	"time"

	"github.com/vishvananda/netlink/nl"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// FilterHooks returns Hooks of a kernel without tcx.
func FilterHooks(find *netdev.Finder, j *journal.Journal) *Hooks {
	return &Hooks{journal: j, find: find, filters: true, held: make(map[journal.Ref]*Attachment)}
}

// Die closes the link as the end of the process would.
func (a *Attachment) Die() error { return a.link.Close() }

// Count returns the counters of a class that splits its packets, or not, with drops below it.
func Count(class Stats, split int, drops uint64) Stats {
	return leaf{split: split, drops: drops}.count(class)
}

// Ceiling is what a class of HTB may send beyond its rate.
type Ceiling struct {
	Minor   uint16
	Ceil    uint64        // bit/s
	Burst   time.Duration // how long it may save up its ceil,
	Saved   time.Duration // and how much it has
	Packets uint64        // sent
}

// ParseCeiling reads a message about a class.
func ParseCeiling(b []byte) (Ceiling, error) {
	m, _, err := parse(b)
	if err != nil {
		return Ceiling{}, err
	}
	const tick = 64 * time.Nanosecond
	c := Ceiling{Minor: uint16(m.handle), Packets: m.stats.Packets}
	ceil, _ := htbWord(m.options, htbOptCeil)
	burst, _ := htbWord(m.options, htbOptCBuffer)
	c.Ceil, c.Burst = 8*uint64(ceil), time.Duration(burst)*tick
	err = netdev.EachAttr(b[nl.SizeofTcMsg:], func(typ uint16, v []byte) error {
		if typ == nl.TCA_XSTATS && len(v) >= 20 { // struct tc_htb_xstats: lends, borrows, giants, tokens, ctokens
			c.Saved = time.Duration(int32(binary.NativeEndian.Uint32(v[16:]))) * tick
		}
		return nil
	})
	return c, err
}
