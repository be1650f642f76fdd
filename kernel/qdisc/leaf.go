package qdisc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrLeaf is returned for a class whose packets are to be cut where somebody has
// put a qdisc of their own below it.
var ErrLeaf = errors.New("somebody's qdisc is below the class")

// What cuts packets is a token bucket filter (net/sched/sch_tbf.c, tbf_segment): one
// that is larger than the bucket is cut by software when it is enqueued, whoever has
// sent it, and whenever its connection began. The rate is so high that even 64 KiB
// take no nanosecond of the bucket, so that it never holds anything back.
const (
	splitRate = 125e12 // bytes/s
	// splitQueue is how many of the largest packets its queue has room for; its
	// length is counted in bytes.
	splitQueue = 1000
	// uncut is the largest packet where none is cut any more, but the qdisc is still
	// there, since it cannot go without what waits in it.
	uncut = 65536
)

// Options of TBF (linux/pkt_sched.h).
const (
	tbfParms, tbfRate64, tbfBurst = 1, 4, 6
	sizeofTBFOpt                  = 36
	// Offsets in struct tc_tbf_qopt: two tc_ratespec of 12 bytes, then limit.
	tbfOptRate, tbfOptLimit = 8, 24
)

// splitOptions gives the options of what cuts packets larger than size.
func splitOptions(size int) []byte {
	ne := binary.NativeEndian
	opt := make([]byte, sizeofTBFOpt)
	ne.PutUint32(opt[tbfOptRate:], math.MaxUint32)
	ne.PutUint32(opt[tbfOptLimit:], uint32(splitQueue*size))
	b := nl.NewRtAttr(tbfParms, opt).Serialize()
	b = append(b, nl.NewRtAttr(tbfRate64, ne.AppendUint64(nil, splitRate)).Serialize()...)
	burst := uint32(size)
	if size >= uncut {
		burst = math.MaxUint32 // BIG TCP, too
	}
	return append(b, nl.NewRtAttr(tbfBurst, ne.AppendUint32(nil, burst)).Serialize()...)
}

// splitOf reads which packets are cut, from options as the kernel shows them:
// without the burst, but with the limit, which says the same. 0 is of somebody's.
func splitOf(kind string, options []byte) int {
	attrs, err := attributes(options)
	if kind != string(KindTBF) || err != nil {
		return 0
	}
	ne := binary.NativeEndian
	ours, size := false, 0
	for _, a := range attrs {
		switch {
		case a.typ == tbfParms && len(a.value) >= sizeofTBFOpt:
			size = int(ne.Uint32(a.value[tbfOptLimit:]) / splitQueue)
		case a.typ == tbfRate64 && len(a.value) >= 8:
			ours = ne.Uint64(a.value) == splitRate
		}
	}
	if !ours {
		return 0
	}
	return size
}

// leaf is the qdisc below a class of ours, if there is one beside the kernel's own.
type leaf struct {
	handle uint32 // 0: the kernel's own
	kind   string
	split  int // what is cut; 0 if it is somebody's
	queued uint64
	drops  uint64
}

// leaves lists those below some classes, by minor.
func (d *Device) leaves(classes map[uint16]message) (map[uint16]leaf, error) {
	below := false
	for _, c := range classes {
		below = below || c.info != 0 // tcm_info of a class is the handle of its leaf
	}
	if !below {
		return nil, nil
	}
	list, err := d.qdiscs()
	if err != nil {
		return nil, err
	}
	out := make(map[uint16]leaf)
	for _, m := range list {
		if m.handle != 0 && m.parent != rootParent && m.parent&0xffff0000 == Handle {
			out[uint16(m.parent)] = leaf{m.handle, m.kind, splitOf(m.kind, m.options), m.stats.Queued, m.stats.Drops}
		}
	}
	return out, nil
}

// Widen has packets of all classes of our root that are cut be cut at no less than
// size, as Class.Split counts. What waits is not lost. Errors: ErrNotOurs,
// journal.ErrGone.
func (d *Device) Widen(kind Kind, size int) error {
	have, err := d.ours(kind)
	if err != nil {
		return d.wrap("list classes", err)
	}
	cut, err := d.leaves(have)
	if err != nil {
		return d.wrap("list leaves", err)
	}
	var errs []error
	for minor, is := range cut {
		if is.split == 0 || is.split >= size {
			continue
		}
		if _, err := d.setLeaf(is, Class{Minor: minor, Split: size}); err != nil {
			errs = append(errs, d.wrap(fmt.Sprintf("set how packets of class %x are cut", minor), err))
		}
	}
	return errors.Join(errs...)
}

// count gives the counters of a class, with what it does not see of what cuts its
// packets.
func (l leaf) count(class Stats) Stats {
	// Not when some frames of a packet that was cut are dropped.
	class.Drops = max(class.Drops, l.drops)
	if l.split > 0 {
		// TBF takes each frame that leaves from the bytes of its queue, and until the
		// end of 2024 it did not add them all when it cut the packet (net/sched/sch_tbf.c,
		// tbf_segment): these wrap around.
		class.Backlog = min(class.Backlog, class.Queued*uint64(l.split))
	}
	return class
}

// setLeaf has the packets of a class cut, or not, as it says. What waits is lost
// when that begins, as the kernel has no way to put it into another queue; when it
// ends, what comes between the look at an empty queue and its end.
func (d *Device) setLeaf(is leaf, c Class) (changed bool, err error) {
	m := message{handle: is.handle, parent: Handle | uint32(c.Minor), kind: string(KindTBF), options: splitOptions(c.Split)}
	switch {
	case is.split == c.Split, c.Split == 0 && is.split == 0:
		return false, nil
	case is.handle == 0:
		return true, d.send(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL, m)
	case is.split == 0:
		return false, fmt.Errorf("%w: %s with handle %x", ErrLeaf, is.kind, is.handle>>16)
	case c.Split > 0:
		return true, d.send(unix.RTM_NEWQDISC, 0, m)
	case is.queued == 0:
		return true, d.send(unix.RTM_DELQDISC, 0, message{handle: is.handle, parent: m.parent})
	case is.split != uncut: // it goes with a Bring that finds it empty
		m.options = splitOptions(uncut)
		return true, d.send(unix.RTM_NEWQDISC, 0, m)
	}
	return false, nil
}
