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
	var list []netlink.Filter
	err = ns.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		list, err = h.FilterList(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}, netlink.MakeHandle(0xffff, 0)) // of an ingress qdisc
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
