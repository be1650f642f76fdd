package qdisc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Parents with a meaning of their own (linux/pkt_sched.h).
const (
	rootParent    = 0xffffffff // TC_H_ROOT
	ingressParent = 0xfffffff1 // TC_H_INGRESS, also that of clsact
)

// valueOf returns the value of the first attribute of a type that has at least size bytes; nil:
// there is none.
func valueOf(options []byte, typ uint16, size int) (value []byte) {
	err := netdev.EachAttr(options, func(t uint16, v []byte) error {
		if value == nil && t == typ && len(v) >= size {
			value = v
		}
		return nil
	})
	if err != nil {
		return nil
	}
	return value
}

// message is one qdisc, class or filter of a device, in the form of rtnetlink.
type message struct {
	handle, parent uint32
	info           uint32 // tcm_info; of a filter its preference and protocol
	kind           string
	options        []byte // the content of TCA_OPTIONS; nil if there is none
	keep           string // why it cannot be recreated from these fields; "" if it can
	stats          Stats
}

// dump asks for all messages of a type that are about the device.
func (d *Device) dump(typ int, about message) ([]message, error) {
	// Repeat a dump that a concurrent change has interrupted.
	for range 10 {
		req := d.request(typ, unix.NLM_F_DUMP, about)
		raw, err := req.Execute(unix.NETLINK_ROUTE, 0)
		if errors.Is(err, nl.ErrDumpInterrupted) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var out []message
		for _, b := range raw {
			m, index, err := parse(b)
			if err != nil {
				return nil, err
			}
			if index == d.index {
				out = append(out, m)
			}
		}
		return out, nil
	}
	return nil, errors.New("it changes faster than it can be read")
}

// send makes a change.
func (d *Device) send(typ, flags int, m message) error {
	_, err := d.request(typ, flags|unix.NLM_F_ACK, m).Execute(unix.NETLINK_ROUTE, 0)
	return err
}

func (d *Device) request(typ, flags int, m message) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(typ, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: d.socket}
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(d.index), Handle: m.handle, Parent: m.parent, Info: m.info})
	if m.kind != "" {
		req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(m.kind)))
	}
	if m.options != nil {
		req.AddData(nl.NewRtAttr(nl.TCA_OPTIONS, m.options))
	}
	return req
}

// Attributes that netlink's package does not name.
const (
	tcaRate         = 5
	tcaHWOffload    = 12
	tcaIngressBlock = 13
	tcaEgressBlock  = 14

	statsBasic = 1 // TCA_STATS_BASIC: bytes u64, packets u32
	statsQueue = 3 // TCA_STATS_QUEUE: qlen, backlog, drops, requeues, overlimits u32
	statsPkt64 = 8 // TCA_STATS_PKT64

	xstatsHTBBorrows = 4 // offset in struct tc_htb_xstats
)

// sharesBlock is why a qdisc that shares its filters with others cannot be recreated.
const sharesBlock = "it shares a block of filters"

// parse reads one message, and the index of its device.
func parse(b []byte) (message, int, error) {
	if len(b) < nl.SizeofTcMsg {
		return message{}, 0, fmt.Errorf("qdisc message of %d bytes", len(b))
	}
	ne := binary.NativeEndian
	m := message{handle: ne.Uint32(b[8:]), parent: ne.Uint32(b[12:]), info: ne.Uint32(b[16:])}
	index := int(int32(ne.Uint32(b[4:])))
	err := netdev.EachAttr(b[nl.SizeofTcMsg:], func(typ uint16, v []byte) error {
		switch typ {
		case nl.TCA_KIND:
			m.kind = unix.ByteSliceToString(v)
		case nl.TCA_OPTIONS:
			m.options = append([]byte{}, v...)
		case nl.TCA_STATS2:
			return m.stats.read(v)
		case nl.TCA_XSTATS:
			if len(v) >= xstatsHTBBorrows+4 && m.kind == string(KindHTB) {
				m.stats.Borrowed = uint64(ne.Uint32(v[xstatsHTBBorrows:]))
			}
		case nl.TCA_STAB:
			m.keep = "it has a size table"
		case tcaRate:
			m.keep = "it has a rate estimator"
		case tcaIngressBlock, tcaEgressBlock:
			m.keep = sharesBlock
		case tcaHWOffload:
			if len(v) > 0 && v[0] != 0 {
				m.keep = "it runs in the device's hardware"
			}
		}
		return nil
	})
	if err != nil {
		return message{}, 0, fmt.Errorf("qdisc message: %w", err)
	}
	return m, index, nil
}

func (s *Stats) read(b []byte) error {
	ne := binary.NativeEndian
	return netdev.EachAttr(b, func(typ uint16, v []byte) error {
		switch {
		case typ == statsBasic && len(v) >= 12:
			s.Bytes = ne.Uint64(v)
			s.Packets = max(s.Packets, uint64(ne.Uint32(v[8:])))
		case typ == statsPkt64 && len(v) >= 8:
			s.Packets = ne.Uint64(v)
		case typ == statsQueue && len(v) >= 20:
			// struct gnet_stats_queue: qlen, backlog, drops, requeues, overlimits.
			s.Queued, s.Backlog, s.Drops = uint64(ne.Uint32(v)), uint64(ne.Uint32(v[4:])), uint64(ne.Uint32(v[8:]))
			s.Overlimits = uint64(ne.Uint32(v[16:]))
		}
		return nil
	})
}

// Options of HTB and HFSC (linux/pkt_sched.h).
const (
	htbParms, htbInit, htbRate64, htbCeil64 = 1, 2, 6, 7
	hfscRSC, hfscFSC, hfscUSC               = 1, 2, 3
	sizeofHTBOpt                            = 44
	// Offsets in struct tc_htb_opt: two tc_ratespec of 12 bytes, which end with the rate, then
	// buffer, cbuffer, quantum, level and prio.
	htbOptRate, htbOptCeil, htbOptBuffer, htbOptCBuffer, htbOptQuantum, htbOptLevel, htbOptPrio = 8, 20, 24, 28, 32, 36, 40
)

// rootOptions returns the options of our root of a kind.
func rootOptions(kind Kind) []byte {
	ne := binary.NativeEndian
	switch kind {
	case KindHFSC:
		return ne.AppendUint16(nil, MinorDefault) // struct tc_hfsc_qopt
	case KindTBF:
		return splitOptions(1514)
	}
	// struct tc_htb_glob: version 3, rate2quantum 10 (not used, each class has its quantum),
	// defcls, debug, direct_pkts.
	var glob []byte
	for _, v := range []uint32{3, 10, MinorDefault, 0, 0} {
		glob = ne.AppendUint32(glob, v)
	}
	return nl.NewRtAttr(htbInit, glob).Serialize()
}

// options returns the class's options for a root of the kind.
func (c Class) options(kind Kind) []byte {
	if kind == KindHFSC {
		var b []byte
		for typ, curve := range []Curve{hfscRSC: c.HFSC.RealTime, hfscFSC: c.HFSC.LinkShare, hfscUSC: c.HFSC.UpperLimit} {
			if curve != (Curve{}) {
				b = append(b, nl.NewRtAttr(typ, curve.serialize()).Serialize()...)
			}
		}
		return b
	}
	ne, h := binary.NativeEndian, c.HTB
	rate, ceil := h.Rate/8, h.Ceil/8
	opt := make([]byte, sizeofHTBOpt)
	ne.PutUint32(opt[htbOptRate:], clamp(rate))
	ne.PutUint32(opt[htbOptCeil:], clamp(ceil))
	ne.PutUint32(opt[htbOptBuffer:], ticks(h.Burst, rate))
	ne.PutUint32(opt[htbOptCBuffer:], ticks(h.CBurst, ceil))
	ne.PutUint32(opt[htbOptQuantum:], h.Quantum)
	ne.PutUint32(opt[htbOptPrio:], h.Prio)
	b := nl.NewRtAttr(htbParms, opt).Serialize()
	for typ, v := range map[int]uint64{htbRate64: rate, htbCeil64: ceil} {
		if v > 1<<32-1 {
			b = append(b, nl.NewRtAttr(typ, ne.AppendUint64(nil, v)).Serialize()...)
		}
	}
	return b
}

// lowered reports whether a class of HTB gets a lower ceil. The kernel shows all rates above 32
// bits of bytes/s as the same.
func lowered(shown, want []byte) bool {
	was, known := htbWord(shown, htbOptCeil)
	is, _ := htbWord(want, htbOptCeil)
	return known && is < was
}

// htbWord reads one word of struct tc_htb_opt.
func htbWord(options []byte, at int) (uint32, bool) {
	opt := valueOf(options, htbParms, sizeofHTBOpt)
	if opt == nil {
		return 0, false
	}
	return binary.NativeEndian.Uint32(opt[at:]), true
}

func (c Curve) serialize() []byte {
	var b []byte
	for _, v := range []uint32{clamp(c.M1 / 8), clamp(uint64(c.D / time.Microsecond)), clamp(c.M2 / 8)} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

func clamp(v uint64) uint32 { return uint32(min(v, 1<<32-1)) }

// ticks returns the time that bytes take at a rate (bytes/s), in the unit of the packet schedulers:
// 64 ns (PSCHED_SHIFT, net/pkt_sched.h).
func ticks(bytes uint32, rate uint64) uint32 {
	ns := float64(bytes) / float64(max(rate, 1)) * 1e9
	return uint32(min(ns/64, 1<<32-1))
}

// same compares a class's options as the kernel shows them with the desired ones. The kernel adds
// further values.
func same(kind Kind, shown, want []byte) bool {
	value := func(options []byte, typ uint16) []byte {
		v := bytes.Clone(valueOf(options, typ, 0))
		if kind == KindHTB && typ == htbParms && len(v) >= sizeofHTBOpt {
			v = v[:sizeofHTBOpt]
			clear(v[0:htbOptRate])           // cell_log, linklayer and so on: not ours
			clear(v[12:htbOptCeil])          //
			clear(v[htbOptLevel:htbOptPrio]) // depends on the classes below
		}
		return v
	}
	types := []uint16{htbParms, htbRate64, htbCeil64}
	if kind == KindHFSC {
		types = []uint16{hfscRSC, hfscFSC, hfscUSC}
	}
	return !slices.ContainsFunc(types, func(typ uint16) bool { return !bytes.Equal(value(shown, typ), value(want, typ)) })
}
