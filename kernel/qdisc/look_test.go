package qdisc_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// A look shows what packets meet, in order, and which of it is ours.
func TestLook(t *testing.T) {
	testkit.OnKernels(t)
	for _, filters := range []bool{false, true} {
		t.Run(fmt.Sprintf("filters=%v", filters), func(t *testing.T) {
			h := newHooked(t, filters)
			want := func(when string, want qdisc.State) {
				t.Helper()
				got, err := h.hooks.Look(h.ns, h.index)
				must(t, err)
				testkit.Same(t, when, want, got)
			}
			want("nothing is there", qdisc.State{Root: "noqueue"})
			kind := "tcx"
			if h.hooks.Filters() {
				kind = "bpf"
			}
			ours := func(name string, egress bool, stage qdisc.Stage) qdisc.Hooked {
				p := program(t, pass)
				a, err := h.hooks.Attach(qdisc.Hook{NS: h.ns, Index: h.index, Egress: egress, Stage: stage, Name: name}, p, journal.Owner{Feature: "test"})
				must(t, err)
				t.Cleanup(func() { must(t, a.Close()) })
				return qdisc.Hooked{Kind: kind, Program: id(t, p), Ours: true, Stage: stage, Name: name}
			}
			last := ours("last", true, qdisc.Others+1)
			first := ours("first", true, 1)
			in := ours("in", false, 2)
			if kind == "bpf" { // a filter runs a program that calls ours
				state, err := h.hooks.Look(h.ns, h.index)
				must(t, err)
				for i, p := range []*qdisc.Hooked{&first, &last} {
					p.Program = state.Egress[i].Program
				}
				in.Program = state.Ingress[0].Program
			}
			want("ours", qdisc.State{Root: "noqueue", Ingress: []qdisc.Hooked{in}, Egress: []qdisc.Hooked{first, last}})
			if kind == "tcx" {
				h.clsact()
			}
			h.theirs(unix.ETH_P_IP, 100, "theirs")
			state, err := h.hooks.Look(h.ns, h.index)
			must(t, err)
			if at := slices.IndexFunc(state.Egress, func(p qdisc.Hooked) bool { return !p.Ours }); len(state.Egress) != 3 || state.Egress[at].Kind != "bpf" ||
				state.Egress[at].Program == 0 || at != map[string]int{"tcx": 2, "bpf": 1}[kind] {
				t.Errorf("with a filter of somebody's: %+v", state.Egress)
			}
			if kind == "tcx" {
				theirs := program(t, pass)
				must(t, h.ns.Do(func() error {
					l, err := link.AttachTCX(link.TCXOptions{Interface: h.index, Program: theirs, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
					if err == nil {
						t.Cleanup(func() { l.Close() })
					}
					return err
				}))
				state, err := h.hooks.Look(h.ns, h.index)
				must(t, err)
				if diff := cmp.Diff([]qdisc.Hooked{{Kind: "tcx", Program: id(t, theirs)}, in}, state.Ingress); diff != "" {
					t.Errorf("with a program of somebody's (-want +got):\n%s", diff)
				}
			}
			testkit.Is(t, "of a device that is not there", testkit.Err(h.hooks.Look(h.ns, 4711)), journal.ErrGone)
		})
	}
}

func id(t *testing.T, p *ebpf.Program) uint32 {
	t.Helper()
	info, err := p.Info()
	must(t, err)
	id, _ := info.ID()
	return uint32(id)
}
