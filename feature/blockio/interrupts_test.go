package blockio

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// On this machine, the network's interrupts leave the disk's CPUs while a container asks for that, and
// return after the last one.
func TestInterruptsApart(t *testing.T) {
	h := newHost(t)
	known := h.diskWithInterrupts()
	p, partly, err := h.apart(askers(known.name))
	must(t, err)
	moves := p.moves
	if len(moves) == 0 {
		testkit.Skip(t, "no interrupt of a network can be moved from the CPUs of a disk")
	}
	state := func() (out []string) {
		for _, m := range moves {
			out = append(out, value(t, irq.Affinity("/proc", m.irq)))
		}
		return out
	}
	before := state()
	path := "/dev/" + known.name
	h.capacity(path, 1000)
	a, _ := h.container("a")
	b, _ := h.container("b")
	apply := func(c container.Container, way string) {
		t.Helper()
		if err := h.Apply(t.Context(), target(t, c, "io.reserve: "+path+" riops=1", "io.interrupts: "+way)); err != nil && (partly == nil || !errors.Is(err, feature.ErrPartly)) {
			t.Fatal(err)
		}
	}
	apply(a, "auto")
	testkit.Same(t, "moved by itself", before, state())
	apply(a, "apart")
	apply(b, "apart")
	disk := known.serving()
	served := func() (out []string) {
		for _, m := range moves {
			if slices.ContainsFunc(m.cpus, func(cpu int) bool { return slices.Contains(disk, cpu) }) {
				out = append(out, fmt.Sprint(m))
			}
		}
		return out
	}
	if now := state(); slices.Equal(now, before) || served() != nil {
		t.Errorf("CPUs %v, were %v; with the disk %v: %v", now, before, disk, served())
	}
	apart := state()
	must(t, h.Remove(t.Context(), a.ID))
	testkit.Same(t, "one asks for it still: CPUs", apart, state())
	// A killed agent leaves them to the next, which prunes them if no container asks.
	must(t, h.Close())
	h.open()
	must(t, h.Prune(t.Context(), func(container.ID) bool { return true }))
	if now := state(); !slices.Equal(now, before) || len(h.journal.Entries()) != 0 {
		t.Errorf("nobody asks for it any more: CPUs %v, were %v; %+v", now, before, h.journal.Entries())
	}
}

// A choice of the administrator stays, and the status says so. It also says that a disk has no
// interrupts, even before anything has to move.
func TestInterruptByHand(t *testing.T) {
	h := newHost(t)
	known := h.diskWithInterrupts()
	p, _, err := h.apart(askers(known.name))
	must(t, err)
	if len(p.moves) == 0 {
		testkit.Skip(t, "no interrupt of a network can be moved from the CPUs of a disk")
	}
	number := p.moves[0].irq
	knob := irq.Affinity("/proc", number)
	before := value(t, knob)
	cpus, err := irq.CPUs("/proc", number)
	must(t, err)
	theirs := cgroup.FormatCPUs(cpus)
	t.Cleanup(func() { must(t, knob.Write(before)) })
	must(t, knob.Write(theirs))
	h.capacity("/dev/"+known.name, 1000)
	c, _ := h.container("c")
	for _, way := range []string{"auto", "apart"} {
		err := h.Apply(t.Context(), target(t, c, "io.reserve: /dev/"+known.name+" riops=1", "io.interrupts: "+way))
		if !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), fmt.Sprintf("somebody has chosen the CPUs of interrupts %d", number)) {
			t.Errorf("%s: %v", way, err)
		}
		testkit.Gives(t, way+": CPUs", theirs)(knob.Read())
	}
	loop := h.disk(1000)
	for _, way := range []string{"auto", "apart"} {
		err := h.Apply(t.Context(), target(t, c, "io.reserve: "+loop.Path+" riops=1", "io.interrupts: "+way))
		if !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), "no disk of its reservations has interrupts of its own") {
			t.Errorf("%s at a loop device: %v", way, err)
		}
	}
	must(t, h.Apply(t.Context(), target(t, c, "io.reserve: "+loop.Path+" riops=1")))
}

// askers is a container that has reserved something of a disk.
func askers(disk string) []*managed {
	return []*managed{{reserved: []reservation{{disk: block.Disk{Name: disk}}}}}
}

// diskWithInterrupts finds a disk of this machine.
func (h *host) diskWithInterrupts() device {
	h.t.Helper()
	disks, err := block.Disks("/sys")
	must(h.t, err)
	var names []string
	for _, d := range disks {
		names = append(names, d.Name)
	}
	found, err := h.devices("block", names)
	must(h.t, err)
	if len(found) == 0 {
		testkit.Skip(h.t, "no disk of this machine has interrupts")
	}
	return found[0]
}

// While a container asks for that, packets of all containers are received away from the disk's CPUs,
// including those of a container that starts later.
func TestVethsApart(t *testing.T) {
	h := newHost(t)
	disk := h.diskWithInterrupts()
	home, far := testkit.NetNS(t), testkit.NetNS(t)
	home.Bind(t)
	var err error
	h.net, err = netdev.Open(home.Path)
	must(t, err)
	p, _, err := h.apart(askers(disk.name))
	must(t, err)
	if len(p.cpus) == 0 {
		testkit.Skip(t, "a disk is served by all CPUs")
	}
	networked := func(name, end string) (container.Container, journal.Knob) {
		t.Helper()
		testkit.Veth(t, home, end, far, end+"p")
		index, err := h.net.Index(end)
		must(t, err)
		c, _ := h.container(name)
		elsewhere := container.Interface{Kind: "veth", Host: container.HostEnd{NetNS: far.Inode, Name: end + "p"}}
		c.Interfaces = []container.Interface{elsewhere, {Kind: "veth", Host: container.HostEnd{NetNS: home.Inode, Name: end, Index: index}}}
		return c, h.net.RPS(index, 0)
	}
	path := "/dev/" + disk.name
	h.capacity(path, 1000)
	before := func(c container.Container, k journal.Knob) string {
		t.Helper()
		was := value(t, k)
		must(t, h.Apply(t.Context(), target(t, c, "io.yield: off")))
		return was
	}
	early, earlyRPS := networked("early", "flend0")
	was := before(early, earlyRPS)
	asker, _ := h.container("asker")
	asks := target(t, asker, "io.reserve: "+path+" riops=1", "io.interrupts: apart")
	if err := h.Apply(t.Context(), asks); err != nil && !errors.Is(err, feature.ErrPartly) {
		t.Fatal(err)
	}
	late, lateRPS := networked("late", "flend1")
	before(late, lateRPS)
	want := netdev.CPUMask(p.cpus, was)
	if value(t, earlyRPS) != want || value(t, lateRPS) != want {
		t.Errorf("rps_cpus %q and %q, want %q", value(t, earlyRPS), value(t, lateRPS), want)
	}
	must(t, h.Remove(t.Context(), late.ID))
	var told []container.ID
	h.Notify(func(id container.ID) { told = append(told, id) })
	must(t, earlyRPS.Write(netdev.CPUMask([]int{0, 1}, was)))
	_, err = h.Decide(nil, true)
	must(t, err)
	testkit.Same(t, "told of what somebody has chosen", []container.ID{asker.ID}, told)
	mustSayPartly(t, h.Apply(t.Context(), asks), true, "hands its packets to CPUs that somebody else has chosen")
	must(t, earlyRPS.Write(was))
	if err := h.Apply(t.Context(), asks); err != nil && !errors.Is(err, feature.ErrPartly) {
		t.Fatal(err)
	}
	testkit.Same(t, "another has gone: rps_cpus", want, value(t, earlyRPS))
	must(t, h.Remove(t.Context(), asker.ID))
	if value(t, earlyRPS) != was || value(t, lateRPS) != was || len(h.journal.Entries()) != 0 {
		t.Errorf("nobody asks for it any more: rps_cpus %q and %q, were %q; %+v", value(t, earlyRPS), value(t, lateRPS), was, h.journal.Entries())
	}
	must(t, h.Apply(t.Context(), target(t, early, "io.yield: off")))
	testkit.Same(t, "nobody asks for it: rps_cpus", was, value(t, earlyRPS))
}
