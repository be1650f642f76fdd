package qdisc

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
)

// Limit is the limit of a foreign root qdisc on a device's rate.
type Limit struct {
	Kind string // of the limiting qdisc, "tbf"
	Rate uint64 // bit/s at most; 0: not known
}

// unlimited lists the kernel's qdiscs that hold no packet longer than the device does.
var unlimited = []string{
	"pfifo", "bfifo", "pfifo_fast", "pfifo_head_drop", "noqueue", "mq", "mqprio", "multiq", "prio", "ets", "drr", "qfq",
	"sfq", "fq", "fq_codel", "fq_pie", "codel", "pie", "red", "sfb", "choke", "gred", "hhf", "skbprio", "blackhole", "plug",
}

// Limits returns the rate limit of a foreign qdisc from a Root's value, as of Read. limits is false
// for Default, for ours, and for qdiscs that only choose the next packet.
func Limits(value string) (l Limit, limits bool) {
	if text, kept := strings.CutPrefix(value, keptPrefix); kept {
		kind, _, _ := strings.Cut(text, ":")
		return Limit{Kind: kind}, true
	}
	t, err := parseTree(value)
	if err != nil {
		return Limit{}, false // Default, or ours
	}
	if len(t) == 1 {
		if rate, known := t[0].most(); known {
			return Limit{t[0].Kind, rate}, rate > 0
		}
	}
	i := slices.IndexFunc(t, func(n node) bool {
		rate, known := n.most()
		return !slices.Contains(unlimited, n.Kind) && (!known || rate > 0)
	})
	if i < 0 {
		return Limit{}, false
	}
	return Limit{Kind: t[i].Kind}, true
}

// most returns the rate limit of a qdisc for all packets, in bit/s; 0 if it has none. known is
// false for the other kinds.
func (n node) most() (rate uint64, known bool) {
	const tbfRate, cakeBaseRate64 = 8, 2
	get := func(typ uint16, at, size int) uint64 {
		v := valueOf(n.Options, typ, at+size)
		switch {
		case v == nil:
			return 0
		case size == 4:
			return uint64(binary.NativeEndian.Uint32(v[at:]))
		}
		return binary.NativeEndian.Uint64(v[at:])
	}
	switch n.Kind {
	case "tbf": // struct tc_tbf_qopt begins with the tc_ratespec
		rate = max(get(nl.TCA_TBF_PARMS, tbfRate, 4), get(nl.TCA_TBF_RATE64, 0, 8))
		return rate * 8, rate > 0
	case "cake":
		return get(cakeBaseRate64, 0, 8) * 8, true
	}
	return 0, false
}
