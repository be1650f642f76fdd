package qdisc_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// ordered is a device with programs that record the order of their runs.
type ordered struct {
	*hooked
	last *ebpf.Map // the digits of those that the last packet met
}

func newOrdered(t *testing.T, filters bool) *ordered {
	o := &ordered{hooked: newHooked(t, filters)}
	var err error
	o.last, err = ebpf.NewMap(&ebpf.MapSpec{Name: "fl_test_last", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { o.last.Close() })
	return o
}

// digit loads a program that appends its digit to the mark.
func (o *ordered) digit(n int32) *ebpf.Program {
	o.t.Helper()
	const mark = 8 // offset in struct __sk_buff
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "fl_test_digit", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R6, asm.R1, mark, asm.Word),
			asm.LSh.Imm(asm.R6, 4),
			asm.Or.Imm(asm.R6, n),
			asm.StoreMem(asm.R1, mark, asm.R6, asm.Word),
			asm.LoadMapValue(asm.R2, o.last.FD(), 0),
			asm.StoreMem(asm.R2, 0, asm.R6, asm.Word),
			asm.Mov.Imm(asm.R0, next),
			asm.Return(),
		},
	})
	must(o.t, err)
	o.t.Cleanup(func() { p.Close() })
	return p
}

// order sends a packet, and returns the digits of the programs that it met.
func (o *ordered) order() string {
	o.t.Helper()
	must(o.t, o.last.Put(uint32(0), uint32(0)))
	o.wire.send(0, 1)
	var got uint32
	must(o.t, o.last.Lookup(uint32(0), &got))
	return fmt.Sprintf("%x", got)
}

// Whatever is there when a program comes, it goes to the place of its stage: programs attached in
// any order run in that of their stages, and foreign ones between the two halves.
func TestOrder(t *testing.T) {
	testkit.InFull(t)
	stages := []qdisc.Stage{0, 3, qdisc.Others, qdisc.Stages - 1, 1, 2, qdisc.Others + 1}
	stages = stages[:testkit.Scale(t, 4, len(stages))]
	slices.Sort(stages)
	for _, filters := range []bool{false, true} {
		for _, theirs := range []bool{false, true} {
			t.Run(fmt.Sprintf("filters=%v,others=%v", filters, theirs), func(t *testing.T) {
				o := newOrdered(t, filters)
				const other = len("0123456") // the digit between the halves
				if theirs {
					o.theirsCounts(filters, int32(other))
				}
				programs := make([]*ebpf.Program, len(stages))
				for i := range stages {
					programs[i] = o.digit(int32(digitOf(stages, i, other)))
				}
				attach := func(i int) *qdisc.Attachment {
					a, err := o.hooks.Attach(qdisc.Hook{NS: o.ns, Index: o.index, Egress: true, Stage: stages[i], Name: fmt.Sprintf("s%d", i)},
						programs[i], journal.Owner{Feature: "test"})
					must(t, err)
					return a
				}
				present := make([]bool, len(stages))
				want := func() string {
					var digits []string
					for i := range stages {
						if present[i] {
							digits = append(digits, fmt.Sprintf("%x", digitOf(stages, i, other)))
						}
					}
					if theirs {
						digits = append(digits, fmt.Sprintf("%x", other))
					}
					slices.Sort(digits)
					return strings.Join(digits, "")
				}
				// Every set of programs that can be there, and every one that can be added.
				var visit func(from int)
				visit = func(from int) {
					for i := range stages {
						if present[i] {
							continue
						}
						a := attach(i)
						present[i] = true
						testkit.Same(t, fmt.Sprintf("%v came last: order", stages[i]), want(), o.order())
						if i >= from {
							visit(i + 1)
						}
						must(t, a.Close())
						present[i] = false
					}
				}
				visit(0)
				testkit.None(t, "journal", o.journal.Entries())
			})
		}
	}
}

// digitOf numbers the stages: from 1 in the first half, after the foreign ones in the second.
func digitOf(stages []qdisc.Stage, i, other int) int {
	if stages[i] < qdisc.Others {
		return 1 + i
	}
	return other + 1 + i - slices.IndexFunc(stages, func(s qdisc.Stage) bool { return s >= qdisc.Others })
}

// theirsCounts attaches a foreign program: as a filter of the first preference, or by tcx.
func (o *ordered) theirsCounts(filters bool, digit int32) {
	o.t.Helper()
	p := o.digit(digit)
	if !filters && !o.hooks.Filters() {
		must(o.t, o.ns.Do(func() error {
			l, err := link.AttachTCX(link.TCXOptions{Interface: o.index, Program: p, Attach: ebpf.AttachTCXEgress})
			if err == nil {
				o.t.Cleanup(func() { l.Close() })
			}
			return err
		}))
		return
	}
	o.clsact()
	must(o.t, o.wire.h.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: o.index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Handle: 1, Protocol: unix.ETH_P_ALL},
		Fd:          p.FD(), Name: "theirs", DirectAction: true,
	}))
}
