package qdisc_test

import (
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// The value of a foreign root shows its limit: a rate, only that there is some limit, or that there
// is none.
func TestLimits(t *testing.T) {
	testkit.OnKernels(t)
	for name, want := range map[string]struct {
		qdisc.Limit
		limits bool
	}{
		"none": {}, "pfifo": {}, "tbf": {qdisc.Limit{Kind: "tbf", Rate: 8 * mbit}, true},
		"htb": {qdisc.Limit{Kind: "htb"}, true}, "htb with a filter": {qdisc.Limit{Kind: "htb"}, true},
		"ours": {},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWire(t)
			switch name {
			case "htb with a filter":
				w.foreigners()["htb"]()
				must(t, w.h.FilterAdd(&netlink.U32{FilterAttrs: netlink.FilterAttrs{LinkIndex: w.index, Parent: 0x10000, Priority: 1, Protocol: unix.ETH_P_IP}, ClassId: 0x10010}))
			case "ours":
				must(t, shape(openJournal(t, t.TempDir()), w.ns, w.index))
			default:
				w.foreigners()[name]()
			}
			if l, limits := qdisc.Limits(w.root()); l != want.Limit || limits != want.limits {
				t.Errorf("%s: %+v, %v, want %+v", w.root(), l, limits, want)
			}
		})
	}
}

// Below a root that only chooses there may be one that limits.
func TestLimitsBelow(t *testing.T) {
	const prio = `tree [{"what":"qdisc","kind":"prio","handle":65536,"parent":4294967295}`
	if _, limits := qdisc.Limits(prio + "]"); limits {
		t.Error("prio alone limits nothing")
	}
	l, limits := qdisc.Limits(prio + `,{"what":"qdisc","kind":"tbf","handle":131072,"parent":65537}]`)
	if l != (qdisc.Limit{Kind: "tbf"}) || !limits {
		t.Errorf("%+v, %v, want tbf of a rate that is not known", l, limits)
	}
}
