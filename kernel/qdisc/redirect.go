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
	return redirected(ns, index, netlink.MakeHandle(0xffff, 0)) // of an ingress qdisc
}

// Lead makes our root qdisc of a device redirect all packets to an IFB before it classifies them; 0:
// to none. They meet its classes when they come back. The filter goes with the root. Errors:
// journal.ErrGone if the device has gone.
func Lead(ns *netdev.NS, index, to int) error {
	if to != 0 {
		if now, err := redirected(ns, index, Handle); err != nil || now == to {
			return err
		}
	}
	f := &netlink.U32{RedirIndex: to, FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: Handle, Priority: firstPref, Protocol: unix.ETH_P_ALL}}
	err := ns.Do(func() error {
		err := netlink.FilterDel(f) // all of its preference
		if to == 0 || err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		return netlink.FilterAdd(f)
	})
	if to == 0 && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV)) {
		return nil // the root, the filter or the device is missing
	}
	if err = gone(err); err != nil {
		return fmt.Errorf("redirect what device %d in netns %d sends to device %d: %w", index, ns.Inode(), to, err)
	}
	return nil
}

// redirected is Redirected for the filters below a qdisc.
func redirected(ns *netdev.NS, index int, parent uint32) (to int, err error) {
	var list []netlink.Filter
	err = ns.Do(func() (err error) {
		list, err = netlink.FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
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
