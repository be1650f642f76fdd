package netcpu_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// dropPoints returns the devices with early drop, of all namespaces or of one.
func (h *host) dropPoints(netns uint64) (names []string) {
	for _, d := range h.netcpu.DropPoints() {
		if d.By != "" && (netns == 0 || d.Netns == netns) {
			names = append(names, d.Device)
		}
	}
	return names
}

// uplink makes a port of a box's bridge that leads to the wire and polls.
func (h *host) uplink(b *sandbox.Box, name string) {
	h.t.Helper()
	must(h.t, sandbox.Wire(sandbox.End{Box: h.wire, Name: "w" + name}, sandbox.End{Box: b, Name: name, Bridge: "br0"}))
	must(h.t, h.Open(b).Offload(h.Index(b, name), netdev.GRO).Write(netdev.GRO.On()))
}

// The drop points of a deleted namespace go with it, while others stay.
func TestDropPointsOfAGoneNamespace(t *testing.T) {
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	far := *h
	far.ns = h.create(sandbox.Spec{Name: "nethost2", Bare: true})
	far.box = h.create(sandbox.Spec{Name: "receiver2"})
	must(t, far.ns.Bridge("br0", netip.Prefix{}))
	h.uplink(far.ns, "nic2")
	h.Join(far.box, "10.67.0.2/24", far.ns, "h0")
	other := far.describe(far.box)
	netns := other.Interfaces[0].Host.NetNS
	h.apply(h.container, policy.NetCPUIsolate)
	h.apply(other, policy.NetCPUIsolate)
	if got := h.dropPoints(netns); !slices.Equal(got, []string{"nic2"}) {
		t.Fatalf("drop points of the second namespace: %q of %+v", got, h.netcpu.DropPoints())
	}
	must(t, h.netcpu.Remove(t.Context(), other.ID))
	must(t, far.box.Destroy())
	must(t, far.ns.Destroy())
	h.apply(h.container, policy.NetCPUIsolate)
	if got := h.dropPoints(0); !slices.Equal(got, []string{"nic0"}) {
		t.Errorf("drop points %q once the second namespace has gone", got)
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}

// An uplink that no program can be attached to is an error, but the others are still attached, and
// points without a device are still removed.
func TestDropPointsGoOn(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	h.uplink(h.ns, "nic1") // after nic0 in order
	nic := h.Open(h.ns)
	number := h.Index(h.ns, "nic0")
	for full := false; !full; {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "cil_tc", Type: ebpf.SchedCLS, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
		})
		must(t, err)
		defer p.Close()
		var l link.Link
		err = nic.Do(func() (err error) {
			l, err = link.AttachTCX(link.TCXOptions{Interface: number, Program: p, Attach: ebpf.AttachTCXIngress})
			return err
		})
		switch {
		case errors.Is(err, ebpf.ErrNotSupported):
			testkit.Skip(t, "kernel has no tcx")
		case errors.Is(err, unix.ERANGE): // as many as a hook takes (BPF_MPROG_MAX)
			full = true
		default:
			must(t, err)
			t.Cleanup(func() { l.Close() })
		}
	}
	target := h.target(policy.NetCPUIsolate)
	if err := h.netcpu.Apply(t.Context(), target); err == nil || !strings.Contains(err.Error(), "uplink nic0: ") {
		t.Errorf("applied with a full hook at nic0: %v", err)
	}
	if got := h.dropPoints(0); !slices.Equal(got, []string{"nic1"}) {
		t.Errorf("drop points %q", got)
	}
	must(t, h.ns.Delete("nic1"))
	if err := h.netcpu.Apply(t.Context(), target); err == nil {
		t.Error("applied with a full hook at nic0")
	}
	if got := h.dropPoints(0); len(got) != 0 {
		t.Errorf("drop points %q once nic1 has gone", got)
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
}
