package qdisc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// errLeaf is returned if a class that should split its packets has a foreign qdisc below it.
var errLeaf = errors.New("somebody's qdisc is below the class")

// A token bucket filter splits packets (net/sched/sch_tbf.c, tbf_segment). On enqueue it segments
// in software any packet larger than the bucket, of new and existing connections. The rate is so
// high that even 64 KiB take no nanosecond of the bucket, so the filter never delays a packet.
const (
	splitRate = 125e12 // bytes/s
	// splitQueue is the number of packets of the largest size that its queue can hold; the kernel
	// counts the length in bytes.
	splitQueue = 1000
	// uncut is the bucket size when no packet needs splitting any more. The qdisc stays, because
	// removing it would lose the packets in it.
	uncut = 65536
)

// Options of TBF (linux/pkt_sched.h).
const (
	tbfParms, tbfRate64, tbfBurst = 1, 4, 6
	sizeofTBFOpt                  = 36
	// Offsets in struct tc_tbf_qopt: two tc_ratespec of 12 bytes, then limit.
	tbfOptRate, tbfOptLimit = 8, 24
)

// splitOptions returns the options of a filter that splits packets larger than size.
func splitOptions(size int) []byte {
	ne := binary.NativeEndian
	opt := make([]byte, sizeofTBFOpt)
	ne.PutUint32(opt[tbfOptRate:], math.MaxUint32)
	ne.PutUint32(opt[tbfOptLimit:], uint32(splitQueue*size))
	b := nl.NewRtAttr(tbfParms, opt).Serialize()
	b = append(b, nl.NewRtAttr(tbfRate64, ne.AppendUint64(nil, splitRate)).Serialize()...)
	burst := uint32(size)
	if size >= uncut {
		burst = math.MaxUint32 // for BIG TCP, too
	}
	return append(b, nl.NewRtAttr(tbfBurst, ne.AppendUint32(nil, burst)).Serialize()...)
}

// splitOf returns the size to which packets are split, from options as the kernel shows them:
// without the burst, but with the limit, which implies it. It returns 0 for a foreign filter.
func splitOf(kind string, options []byte) int {
	ne := binary.NativeEndian
	opt, rate := valueOf(options, tbfParms, sizeofTBFOpt), valueOf(options, tbfRate64, 8)
	if kind != string(KindTBF) || opt == nil || rate == nil || ne.Uint64(rate) != splitRate {
		return 0
	}
	return int(ne.Uint32(opt[tbfOptLimit:]) / splitQueue)
}

// leaf is the qdisc below a class of ours, if it is not the kernel's own.
type leaf struct {
	handle uint32 // 0: the kernel's own
	kind   string
	split  int // size that packets are cut to; 0 if it is foreign
	queued uint64
	drops  uint64
}

// leaves lists the qdiscs below some classes, by minor.
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

// Widen raises the size that the classes of our root split packets to, to at least size, counted as
// in Class.Split. It loses no packet. Errors: ErrNotOurs, journal.ErrGone.
func (d *Device) Widen(kind Kind, size int) error {
	_, cut, err := d.classes(kind)
	if err != nil {
		return err
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

// count returns the counters of a class, including those of the filter that splits its packets,
// which the class does not see.
func (l leaf) count(class Stats) Stats {
	// The class does not count some dropped frames of a cut packet.
	class.Drops = max(class.Drops, l.drops)
	if l.split > 0 {
		// TBF subtracts each frame that leaves from the bytes of its queue. Until the end of 2024
		// it did not add all frames when it split a packet (net/sched/sch_tbf.c, tbf_segment), so
		// the bytes wrap around.
		class.Backlog = min(class.Backlog, class.Queued*uint64(l.split))
	}
	return class
}

// setLeaf makes a class split its packets, or stop. When it begins, waiting packets are lost,
// because the kernel cannot move them to another queue. When it stops, only packets that come
// between the look at the empty queue and its removal are lost.
func (d *Device) setLeaf(is leaf, c Class) (changed bool, err error) {
	m := message{handle: is.handle, parent: Handle | uint32(c.Minor), kind: string(KindTBF), options: splitOptions(c.Split)}
	switch {
	case is.split == c.Split, c.Split == 0 && is.split == 0:
		return false, nil
	case is.handle == 0:
		return true, d.send(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL, m)
	case is.split == 0:
		return false, fmt.Errorf("%w: %s with handle %x", errLeaf, is.kind, is.handle>>16)
	case c.Split > 0:
		return true, d.send(unix.RTM_NEWQDISC, 0, m)
	case is.queued == 0:
		return true, d.send(unix.RTM_DELQDISC, 0, message{handle: is.handle, parent: m.parent})
	case is.split != uncut: // a Bring that finds it empty removes it
		m.options = splitOptions(uncut)
		return true, d.send(unix.RTM_NEWQDISC, 0, m)
	}
	return false, nil
}
