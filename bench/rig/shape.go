package rig

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Shape limits what the neighbours send, on the path NIC: an HTB at the NIC's
// egress with a class for each of them, of equal parts of a rate in bit/s (Iron,
// section 2.1). Classes are found by source address. Bursts and queues are the
// kernel's defaults. 0 takes the HTB away. Deleting what is not there is fine.
func (r *Rig) Shape(bitsPerSecond uint64) error {
	if r.Path != NIC {
		return fmt.Errorf("shape: the path %s has no NIC of the rig's own", r.Path)
	}
	err := r.Node.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return r.shape(h, bitsPerSecond)
	})
	if err != nil {
		return fmt.Errorf("shape %s to %d bit/s: %w", NICDevice, bitsPerSecond, err)
	}
	return nil
}

func (r *Rig) shape(h *netlink.Handle, bitsPerSecond uint64) error {
	if bitsPerSecond == 0 {
		return r.htb(h, 0, nil)
	}
	classes := make([]Class, 0, len(r.Boxes))
	each := bitsPerSecond / uint64(len(r.Neighbours()))
	for i := 1; i < len(r.Boxes); i++ {
		classes = append(classes, Class{Container: i, Rate: each, Ceil: each})
	}
	return r.htb(h, 0, classes)
}

// Shaped gives the bytes that each neighbour's class has let out, in the order
// of Neighbours; nil without Shape.
func (r *Rig) Shaped() (bytes []uint64, err error) {
	err = r.Node.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName(NICDevice)
		if err != nil {
			return err
		}
		classes, err := h.ClassList(link, netlink.MakeHandle(1, 0))
		if err != nil {
			return err
		}
		slices.SortFunc(classes, func(a, b netlink.Class) int { return int(a.Attrs().Handle) - int(b.Attrs().Handle) })
		for _, c := range classes {
			if s := c.Attrs().Statistics; s != nil {
				bytes = append(bytes, s.Basic.Bytes)
			}
		}
		return nil
	})
	return bytes, err
}
