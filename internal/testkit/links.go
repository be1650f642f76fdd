package testkit

import (
	"errors"
	"iter"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// Links yields the BPF links of this kernel. A link belongs to the caller until its next step.
// Links skips a link that another process is creating or closing: the kernel answers EAGAIN then.
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

// Verdict loads a program that returns the same for each packet.
func Verdict(typ ebpf.ProgramType, name string, verdict int32) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: typ, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
}
