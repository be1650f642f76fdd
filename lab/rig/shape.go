package rig

import (
	"fmt"
)

// Shape limits what the neighbours send, on the path NIC: an HTB at the NIC's egress with a class
// for each of them, with equal parts of a rate in bit/s (Iron, section 2.1). Filters find the
// classes by source address. Bursts and queues are the kernel's defaults. 0 removes the HTB, if
// there is one.
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
