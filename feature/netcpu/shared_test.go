package netcpu_test

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// Two containers in one network namespace have different modes. The strictest mode applies to the
// packets of both, and the container with that mode pays. In the end all settings are the owners',
// whichever container is added, changes or ends first.
func TestModesInOneNamespace(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	const quota, period = 20 * time.Millisecond, 100 * time.Millisecond
	h := newHost(t, sandbox.CPU{})
	h.start(h.box, "udp-recv", "--listen", ":9000") // before the quota, with which it takes long
	must(t, h.box.Limit(sandbox.CPU{Quota: quota, Period: period}))
	shared := h.Create(sandbox.Spec{Name: "sharer", Network: h.box, CPU: sandbox.CPU{Quota: quota, Period: period}})
	one, two := h.container, h.describe(shared)
	apply := h.apply
	limited := func(c container.Container) bool {
		b, err := cgroup.ReadBandwidth(c.Cgroup.CPU)
		must(t, err)
		return b.Quota < quota
	}
	grows := func(c container.Container) func() bool {
		before := h.cost(c)
		return func() bool { return h.cost(c) > before+20*time.Millisecond }
	}
	threads := func(want string) {
		t.Helper()
		if got := strings.Join(h.threads()["eth0"], " "); got != want {
			t.Errorf("the thread of eth0 is in %q, want %q", got, want)
		}
	}
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000")

	apply(one, policy.NetCPUObserve)
	apply(two, policy.NetCPUCharge)
	until(t, "the packets are the charged one's", grows(two))
	until(t, "its quota is lowered", func() bool { return limited(two) })
	if limited(one) {
		t.Error("the other one's quota was lowered")
	}

	apply(one, policy.NetCPUIsolate)
	threads(payer(one))
	until(t, "the packets are the isolated one's", grows(one))
	until(t, "the charged one has paid", func() bool { return !limited(two) })

	apply(one, policy.NetCPUObserve) // the charged one pays again
	threads("")
	until(t, "the packets are the charged one's again", grows(two))
	until(t, "its quota is lowered again", func() bool { return limited(two) })

	apply(one, policy.NetCPUIsolate)
	must(t, h.netcpu.Remove(t.Context(), one.ID)) // as if it had ended
	until(t, "the packets are the last one's", grows(two))
	until(t, "its quota is lowered once more", func() bool { return limited(two) })
	apply(one, policy.NetCPUCharge) // one of two charged containers pays
	apply(two, policy.NetCPUObserve)
	until(t, "the packets are of the one that is charged", grows(one))
	until(t, "that one's quota is lowered", func() bool { return limited(one) && !limited(two) })

	must(t, h.netcpu.Remove(t.Context(), one.ID))
	must(t, h.netcpu.Remove(t.Context(), two.ID))
	if limited(one) || limited(two) || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end: %v, %v, journal %+v", limited(one), limited(two), h.journal.Entries())
	}
}

// Two isolated containers in one network namespace are one tenant. When the payer ends, the other
// takes over, even if the agent was killed meanwhile: the end of the payer does not undo changes that
// the next agent has adopted for the other container.
func TestSharedNamespace(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, sandbox.CPU{})
	shared := h.Create(sandbox.Spec{Name: "sharer", Network: h.box})
	one, two := h.container, h.describe(shared)
	if one.NetNS != two.NetNS || one.ID == two.ID {
		t.Fatalf("containers %+v and %+v, want one namespace and two cgroups", one, two)
	}
	h.apply(one, policy.NetCPUIsolate)
	h.apply(two, policy.NetCPUIsolate)
	h.pays("both are isolated", one)
	must(t, h.netcpu.Remove(t.Context(), one.ID))
	h.pays("the first has ended", two)
	h.apply(one, policy.NetCPUIsolate)
	must(t, h.netcpu.Remove(t.Context(), two.ID))
	must(t, h.netcpu.Close())

	h.open()
	h.apply(two, policy.NetCPUIsolate)
	during := h.state()
	out, err := h.journal.Restore(kernel.Opener(kernel.Default()), func(e journal.Entry) bool { return e.Owner.Container == uint64(one.ID) })
	must(t, err)
	must(t, kernel.Tidy(kernel.Default(), out))
	same(t, "after the first was swept away", h.state(), during)
	h.pays("with another agent", two)
	must(t, h.netcpu.Remove(t.Context(), two.ID))
	h.noThreads("after both have ended")
}

// Changes lapse with their decision, unless another container wants them for good. A renewal does not
// write to the host.
func TestIsolationLapses(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	shared := h.Create(sandbox.Spec{Name: "sharer", Network: h.box})
	one, two := h.container, h.describe(shared)
	apply := func(c container.Container, expiry time.Time) {
		t.Helper()
		must(t, h.netcpu.Apply(t.Context(), policy.Target{Container: c, Settings: policy.Settings{NetCPU: policy.NetCPUIsolate, NetCPUSteal: new(float64)}, Decided: map[string]time.Time{"fairlead.netcpu": expiry}}))
	}
	lapses := func(when string, want time.Time) {
		t.Helper()
		for _, e := range h.journal.Entries() {
			if !e.Expiry.Equal(want) {
				t.Errorf("%s: %v lapses at %v, want %v", when, e.Ref, e.Expiry, want)
			}
		}
	}
	early, late := time.Now().Add(time.Hour).Round(0), time.Now().Add(2*time.Hour).Round(0)
	apply(one, early)
	lapses("decided", early)
	if len(h.journal.Entries()) < 6 {
		t.Fatalf("journal: %+v", h.journal.Entries())
	}
	changed := h.journal.Entries()[0].When
	apply(one, late)
	lapses("renewed", late)
	if got := h.journal.Entries()[0].When; !got.Equal(changed) {
		t.Errorf("renewing turned a knob at %v", got)
	}
	// A charged container needs the changes on the host until its decision lapses.
	three := h.Describe(h.Create(sandbox.Spec{Name: "charged"}))
	later := late.Add(time.Hour)
	for _, at := range []time.Time{later, {}} {
		must(t, h.netcpu.Apply(t.Context(), policy.Target{Container: three, Settings: policy.Settings{NetCPU: policy.NetCPUCharge, NetCPUSteal: new(float64)}, Decided: map[string]time.Time{"fairlead.netcpu": at}}))
		hosts := 0
		for _, e := range h.journal.Entries() {
			switch {
			case e.Owner.Container == uint64(one.ID) && !e.Expiry.Equal(late), e.Owner.Container == 0 && !e.Expiry.Equal(at):
				t.Errorf("another is charged until %v: %v lapses at %v", at, e.Ref, e.Expiry)
			case e.Owner.Container == 0:
				hosts++
			}
		}
		if hosts == 0 {
			t.Error("nothing was changed on the host")
		}
	}
	must(t, h.netcpu.Remove(t.Context(), three.ID))
	lapses("nobody is charged any more", late)
	apply(two, early)
	must(t, h.netcpu.Remove(t.Context(), one.ID))
	lapses("the first has ended", early)
	must(t, h.netcpu.Close())

	// As restore --expired undoes the changes of a killed agent.
	out, err := h.journal.Restore(kernel.Opener(kernel.Default()), func(e journal.Entry) bool { return e.Expired(early) })
	must(t, err)
	if len(out) == 0 || len(h.journal.Entries()) != 0 || len(h.threads()["eth0"]) != 0 {
		t.Errorf("%d undone, %+v left, threads %v", len(out), h.journal.Entries(), h.threads())
	}
}
