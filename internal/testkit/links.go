package testkit

import (
	"errors"
	"iter"
	"syscall"
	"testing"

	"github.com/cilium/ebpf/link"
)

// Links gives the BPF links of this kernel, which are the caller's until its next step. It passes
// over one that is being made or ended by somebody else: the kernel answers EAGAIN then.
func Links(t testing.TB) iter.Seq2[link.ID, link.Link] {
	return func(yield func(link.ID, link.Link) bool) {
		var from link.ID
		for {
			it := link.Iterator{ID: from}
			for it.Next() {
				if from = it.ID; !yield(it.ID, it.Link) {
					it.Close()
					return
				}
			}
			err := it.Err()
			if err == nil {
				return
			}
			if !errors.Is(err, syscall.EAGAIN) {
				t.Fatalf("list links: %v", err)
			}
			from++ // the next at the earliest, since ids go up
		}
	}
}
