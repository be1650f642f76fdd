package qdisc

import (
	"cmp"
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
// redirects all packets (tc-mirred), as the CNI plugin bandwidth has it; 0: there is none, or it
// looks at the packets first.
func Redirected(ns *netdev.NS, index int) (to int, err error) {
	var list []netlink.Filter
	err = ns.Do(func() (err error) {
		list, err = netlink.FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, netlink.MakeHandle(0xffff, 0))
		return err
	})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return 0, fmt.Errorf("list filters of device %d in netns %d: %w", index, ns.Inode(), err)
	}
	slices.SortStableFunc(list, func(a, b netlink.Filter) int { return cmp.Compare(a.Attrs().Priority, b.Attrs().Priority) })
	for _, f := range list {
		if f.Attrs().Protocol != unix.ETH_P_ALL {
			return 0, nil
		}
		switch f := f.(type) {
		case *netlink.U32:
			if f.Sel == nil && f.RedirIndex == 0 {
				continue // the table of a u32, which has no key
			}
			if f.Sel != nil && slices.ContainsFunc(f.Sel.Keys, func(k netlink.TcU32Key) bool { return k.Mask != 0 }) {
				return 0, nil
			}
			return f.RedirIndex, nil
		case *netlink.MatchAll:
			for _, a := range f.Actions {
				if m, ok := a.(*netlink.MirredAction); ok && m.MirredAction == netlink.TCA_EGRESS_REDIR {
					return m.Ifindex, nil
				}
			}
			return 0, nil
		default:
			return 0, nil
		}
	}
	return 0, nil
}

// leadHandle is that of the filter that leads to an IFB. With each IFB it is the same, so that the
// kernel changes it in place.
const leadHandle = Handle | 1

// Lead makes our root qdisc of a device redirect all packets to an IFB before it classifies them, or
// ends that; off: it leaves those that go to another IFB. They meet the classes of the root when they
// come back. None passes by while one IFB takes the place of another. The filter goes with the root.
// Errors: journal.ErrGone if the device has gone.
func Lead(ns *netdev.NS, index, ifb int, on bool) error {
	op := fmt.Sprintf("redirect to device %d what is sent", ifb)
	return root{ns, index}.do(op, func(d *Device) error {
		list, err := d.filters(Handle)
		i := slices.IndexFunc(list, func(f filter) bool { return f.kind == "bpf" && f.handle == leadHandle })
		now := 0 // of one that has gone, too
		if i >= 0 {
			now = list[i].leads()
		}
		if err != nil || on && now == ifb || !on && (i < 0 || now != ifb && now != 0) {
			return err
		}
		if i < 0 || !on {
			err := d.send(unix.RTM_DELTFILTER, 0, message{parent: Handle, info: filterInfo(firstPref)}) // all of the preference
			if !on || err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		return d.lead(ifb)
	})
}

// lead makes the filter, or changes it. What comes back from the IFB does not match it. The kernel's
// own flag for that (skb->tc_skip_classify) is gone once the packet has met a filter of somebody
// else at the clsact, and the packet would go round for good.
func (d *Device) lead(ifb int) error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "fl_ahead", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R1, asm.R1, skbIngressIndex, asm.Word), // skb->skb_iif, which an IFB sets
			asm.Mov.Imm(asm.R0, 0),                                 // no match
			asm.JEq.Imm(asm.R1, int32(ifb), "back"),
			asm.Mov.Imm(asm.R0, next), // a match
			asm.Return().WithSymbol("back"),
		},
	})
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

// skbIngressIndex is the offset of ingress_ifindex in struct __sk_buff.
const skbIngressIndex = 36

// leads returns the index of the device to which the first action of a filter of BPF redirects; 0:
// none, or one that has gone.
func (f filter) leads() int {
	b := f.options
	for _, typ := range []uint16{nl.TCA_BPF_ACT, 1, nl.TCA_ACT_OPTIONS} {
		b = valueOf(b, typ, 0)
	}
	if b = valueOf(b, nl.TCA_MIRRED_PARMS, 28); b == nil {
		return 0
	}
	return int(binary.NativeEndian.Uint32(b[24:])) // struct tc_mirred
}
