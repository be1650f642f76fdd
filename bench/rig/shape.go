package rig

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
)

// Shape limits what the neighbours send, on the path NIC: an HTB at the NIC's
// egress with a class for each of them, of equal parts of a rate in bit/s (Iron,
// section 2.1). Classes are found by source address. Bursts and queues are the
// kernel's defaults. 0 takes the HTB away. Deleting what is not there is fine.
func (r *Rig) Shape(bitsPerSecond uint64) error {
	if r.Path != NIC {
		return fmt.Errorf("shape: the path %s has no NIC of the rig's own", r.Path)
	}
	var classes []Class
	each := bitsPerSecond / uint64(len(r.Neighbours()))
	for i := 1; i < len(r.Boxes) && each > 0; i++ {
		classes = append(classes, Class{Container: i, Rate: each, Ceil: each})
	}
	return r.Link(0, classes)
}

// Shaped gives the bytes that each neighbour's class has let out, in the order
// of Neighbours; nil without Shape.
func (r *Rig) Shaped() (bytes []uint64, err error) {
	err = r.Node.Change(NICDevice, func(h *netlink.Handle, link netlink.Link) error {
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
