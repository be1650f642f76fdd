package isolate

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

func TestDelayFor(t *testing.T) {
	for _, c := range []struct {
		rate      float64
		now, want time.Duration
	}{
		{60_000, 0, time.Millisecond},
		{256_000, 0, 500 * time.Microsecond},
		{256_000, time.Millisecond, 500 * time.Microsecond},
		{180_000, time.Millisecond, time.Millisecond}, // near enough
		{60_000, 500 * time.Microsecond, time.Millisecond},
		{12_800_000, 0, 10 * time.Microsecond},
	} {
		if got := delayFor(c.rate, c.now); got != c.want {
			t.Errorf("at %.0f packets/s, now %v: %v, want %v", c.rate, c.now, got, c.want)
		}
	}
}

// Uplinks that bring a flood poll by a timer until it is over; the others, and one with a delay of
// its operator, are left alone.
func TestDeferPolls(t *testing.T) {
	testkit.OnKernels(t)
	is, ns, index, path := bare(t)
	links, err := ns.Links(netdev.MostLinks)
	must(t, err)
	other := 0
	for _, l := range links {
		if l.Name == "flta" {
			other = l.Index
		}
	}
	key, idle := container.Device{NetNS: ns.Inode(), Index: index}, container.Device{NetNS: ns.Inode(), Index: other}
	is.host = &uplinks{devices: map[container.Device]*uplinkDevice{key: {path: path}, idle: {path: path}}}
	is.worked.heavy = map[container.Device]time.Time{key: time.Now()}
	expect := func(when string, index int, timeout, hardIRQs string) {
		t.Helper()
		for d, want := range map[netdev.Deferral]string{netdev.FlushTimeout: timeout, netdev.HardIRQs: hardIRQs} {
			if got, err := ns.Defer(index, d).Read(); err != nil || got != want {
				t.Errorf("%s: %s of device %d is %s (%v), want %s", when, d, index, got, err, want)
			}
		}
	}
	at := time.Now()
	after := func(d time.Duration, rate float64) {
		t.Helper()
		at = at.Add(d)
		must(t, is.deferPolls(at, rate))
	}
	after(0, 0)
	expect("without a flood", index, "0", "0")
	after(0, 256_000)
	expect("in a flood", index, "500000", "1")
	expect("in a flood", other, "0", "0")
	after(time.Second, 60_000)
	expect("in a smaller one", index, "1000000", "1")
	after(law.Calm/2-time.Second, 0)
	expect("soon after it", index, "1000000", "1")
	after(2*time.Second, 0)
	expect("after it", index, "0", "0")

	must(t, ns.Defer(index, netdev.FlushTimeout).Write("7000"))
	after(time.Second, 256_000)
	expect("with the operator's time", index, "7000", "0")
	after(law.Calm, 0)
	must(t, ns.Defer(index, netdev.FlushTimeout).Write("0"))

	after(time.Second, 256_000)
	must(t, is.Extend(0))
	for _, e := range is.cfg.Journal.Entries() {
		if e.Ref.Kind == netdev.KindDefer && !e.Expiry.Equal(at.Add(law.Long)) {
			t.Errorf("%v lapses %v after it was set, want %v", e.Ref, e.Expiry.Sub(at), law.Long)
		}
	}
	must(t, New(Config{}).Close()) // it has no journal
	must(t, is.Close())
	expect("without the agent", index, "0", "0")
}
