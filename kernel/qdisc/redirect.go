package qdisc

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Redirected returns the index of the device to which the first filter of a device's ingress qdisc
// redirects all packets (tc-mirred), as the CNI plugin bandwidth has it; 0: there is none, or it
// looks at the packets first.
func Redirected(ns *netdev.NS, index int) (to int, err error) {
	to, _, err = redirected(ns, index, netlink.MakeHandle(0xffff, 0)) // of an ingress qdisc
	return to, err
}

// Lead makes our root qdisc of a device redirect all packets to an IFB before it classifies them, or
// ends that; off: it leaves those that go to another IFB. They meet the classes of the root when they
// come back. None passes by while one IFB takes the place of another. The filter goes with the root.
// Errors: journal.ErrGone if the device has gone.
func Lead(ns *netdev.NS, index, ifb int, on bool) error {
	now, handle, err := redirected(ns, index, Handle)
	if err != nil || on && now == ifb || !on && now != ifb && (now != 0 || handle == 0) {
		return err
	}
	at := netlink.FilterAttrs{LinkIndex: index, Parent: Handle, Priority: firstPref, Protocol: unix.ETH_P_ALL}
	err = ns.Do(func() error {
		if !on || handle == 0 {
			err := netlink.FilterDel(&netlink.U32{FilterAttrs: at}) // all of its preference
			if !on || err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		at.Handle = handle // changed in place, if it is there
		return netlink.FilterReplace(&netlink.U32{RedirIndex: ifb, FilterAttrs: at})
	})
	if !on && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV)) {
		return nil // the root, the filter or the device is missing
	}
	if err = gone(err); err != nil {
		return fmt.Errorf("redirect what device %d in netns %d sends to device %d: %w", index, ns.Inode(), ifb, err)
	}
	return nil
}

// redirected is Redirected for the filters below a qdisc. handle is that of a u32 of the first
// preference, also if the device that it leads to has gone; 0: there is none.
func redirected(ns *netdev.NS, index int, parent uint32) (to int, handle uint32, err error) {
	var list []netlink.Filter
	err = ns.Do(func() (err error) {
		list, err = netlink.FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
		return err
	})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return 0, 0, fmt.Errorf("list filters of device %d in netns %d: %w", index, ns.Inode(), err)
	}
	slices.SortStableFunc(list, func(a, b netlink.Filter) int { return cmp.Compare(a.Attrs().Priority, b.Attrs().Priority) })
	for _, f := range list {
		if f.Attrs().Protocol != unix.ETH_P_ALL {
			return 0, 0, nil
		}
		switch f := f.(type) {
		case *netlink.U32:
			if f.Sel == nil && f.RedirIndex == 0 {
				continue // the table of a u32, which has no key
			}
			if f.Sel != nil && slices.ContainsFunc(f.Sel.Keys, func(k netlink.TcU32Key) bool { return k.Mask != 0 }) {
				return 0, 0, nil
			}
			if f.Priority == firstPref {
				handle = f.Handle
			}
			return f.RedirIndex, handle, nil
		case *netlink.MatchAll:
			for _, a := range f.Actions {
				if m, ok := a.(*netlink.MirredAction); ok && m.MirredAction == netlink.TCA_EGRESS_REDIR {
					return m.Ifindex, 0, nil
				}
			}
			return 0, 0, nil
		default:
			return 0, 0, nil
		}
	}
	return 0, 0, nil
}
