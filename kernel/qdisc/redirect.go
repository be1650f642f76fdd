package qdisc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Redirected returns the index of the device to which the first filter of a device's ingress qdisc
// redirects all packets (tc-mirred), as the CNI plugin bandwidth does. 0: there is no such filter,
// or it matches only some packets.
func Redirected(ns *netdev.NS, index int) (to int, err error) {
	err = root{ns, index}.do("look where packets are redirected", func(d *Device) error {
		list, err := d.filters(clsactHandle)
		for _, f := range list {
			sel := valueOf(f.options, nl.TCA_U32_SEL, 16) // struct tc_u32_sel, and keys that begin with a mask
			if f.handle == 0 || f.kind == "u32" && sel == nil {
				continue // the preference itself, or the table of a u32
			}
			for key := range slices.Chunk(sel[min(16, len(sel)):], 16) {
				if string(key[:min(4, len(key))]) != "\x00\x00\x00\x00" {
					return nil
				}
			}
			if f.info == filterInfo(f.pref) && f.kind != "bpf" {
				to = f.leads()
			}
			return nil
		}
		return err
	})
	return to, err
}

// The handles of the filters of our root qdiscs: the one that redirects to an IFB, and the one that
// chooses the class. They are fixed, so that the kernel changes a filter in place.
const leadHandle, sortHandle = Handle | 1, Handle | 2

// Sort makes our root qdisc of a device call a program for each packet whose priority is no
// existing class. The program returns Handle|minor, and outlives its process. A packet that Lead
// redirects is classified when it returns. The filter goes with the root. If the kernel lacks the
// classifier bpf (NET_CLS_BPF), all packets stay in MinorDefault, and Sort returns nil. Errors:
// journal.ErrGone if the device has gone.
func Sort(ns *netdev.NS, index int, p *ebpf.Program) error {
	return root{ns, index}.do("sort packets into classes", func(d *Device) error {
		info, err := p.Info()
		if err != nil {
			return err
		}
		id, _ := info.ID()
		list, err := d.filters(Handle)
		if err != nil || slices.ContainsFunc(list, func(f filter) bool { return f.handle == sortHandle && f.id == uint32(id) }) {
			return err
		}
		err = d.send(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE, message{
			handle: sortHandle, parent: Handle, info: filterInfo(firstPref + 1), kind: "bpf", options: bpfOptions(p, "fairlead, sort", 0),
		})
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	})
}

// Lead makes our root qdisc of a device redirect all packets to an IFB before it classifies them,
// or stops that; off exempts packets that go to another IFB. The packets meet the root's classes
// when they return. No packet bypasses the IFBs while one replaces another. The filter goes with
// the root. Errors: journal.ErrGone if the device has gone.
func Lead(ns *netdev.NS, index, ifb int, on bool) error {
	return root{ns, index}.do(fmt.Sprintf("redirect to device %d what is sent", ifb), func(d *Device) error {
		list, err := d.filters(Handle)
		i := slices.IndexFunc(list, func(f filter) bool { return f.handle == leadHandle })
		now := 0 // of one that has gone, too
		if i >= 0 {
			now = list[i].leads()
		}
		if err != nil || on && now == ifb || !on && (i < 0 || now != ifb && now != 0) {
			return err
		}
		if i < 0 || !on {
			err = d.send(unix.RTM_DELTFILTER, 0, message{parent: Handle, info: filterInfo(firstPref)}) // all of the preference
		}
		if errors.Is(err, unix.ENOENT) || !on && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV)) {
			err = nil // the filter, the root or the device is missing
		}
		if !on || err != nil {
			return err
		}
		return d.lead(ifb)
	})
}

// lead makes or changes the filter. It does not match packets that return from the IFB. The
// kernel's own flag for that (skb->tc_skip_classify) is cleared once the packet has met a foreign
// filter at the clsact, and the packet would circulate forever.
func (d *Device) lead(ifb int) error {
	const ingressIfindex = 36 // in struct __sk_buff: skb->skb_iif, which an IFB sets
	p, err := program("fl_ahead",
		asm.LoadMem(asm.R1, asm.R1, ingressIfindex, asm.Word),
		asm.Mov.Imm(asm.R0, 0), // no match
		asm.JEq.Imm(asm.R1, int32(ifb), "back"),
		asm.Mov.Imm(asm.R0, -1), // a match
		asm.Return().WithSymbol("back"))
	if err != nil {
		return err
	}
	defer p.Close()
	act := nl.NewRtAttr(nl.TCA_BPF_ACT, nil)
	if err := netlink.EncodeActions(act, []netlink.Action{netlink.NewMirredAction(ifb)}); err != nil {
		return err
	}
	return d.send(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE, message{
		handle: leadHandle, parent: Handle, info: filterInfo(firstPref), kind: "bpf",
		options: append(bpfOptions(p, "fairlead, ahead", 0), act.Serialize()...),
	})
}

// leads returns the index of the device to which the first action of a filter redirects; 0: none,
// or the device has gone.
func (f filter) leads() int {
	b := f.options
	for _, typ := range []uint16{map[string]uint16{"bpf": nl.TCA_BPF_ACT, "u32": nl.TCA_U32_ACT, "matchall": nl.TCA_MATCHALL_ACT}[f.kind], 1, nl.TCA_ACT_OPTIONS} {
		b = valueOf(b, typ, 0)
	}
	const action, to, size = 20, 24, 28 // struct tc_mirred
	ne := binary.NativeEndian
	if b = valueOf(b, nl.TCA_MIRRED_PARMS, size); b == nil || ne.Uint32(b[action:]) != uint32(netlink.TCA_EGRESS_REDIR) {
		return 0
	}
	return int(ne.Uint32(b[to:]))
}
