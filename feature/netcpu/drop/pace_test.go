package drop

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/tenant"
)

// A pace lets a ring of packets pass at once, and then one each gap, until it ends or is not
// renewed. It holds at the uplink, and not for what the host itself sends.
func TestPace(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w, err := e.add(another(e), 1)
	must(t, err)
	counter, driver := count(t, e, w), native(t, e, lo)
	run(t, counter, frame("10.0.0.1"), 1)
	seen(t, e)
	const packets, perSecond = 2000, 100
	for name, p := range map[string]*ebpf.Program{"uplink": e.tc, "driver": driver} {
		// sends returns how many packets were dropped, and the most that the pace lets pass.
		sends := func() (dropped, pass uint64) {
			t.Helper()
			before, err := w.read()
			must(t, err)
			began := time.Now()
			run(t, p, frame("10.0.0.1"), packets)
			pass = ring + 1 + uint64(time.Since(began)*perSecond/time.Second)
			after, err := w.read()
			must(t, err)
			dropped = after.Dropped - before.Dropped
			if got := after.Arrived - before.Arrived; got != packets {
				t.Errorf("%s: %d packets arrived, want %d", name, got, packets)
			}
			if got := after.Beyond - before.Beyond; got != dropped {
				t.Errorf("%s: %d of %d dropped packets are beyond the limit, want all", name, got, dropped)
			}
			return dropped, pass
		}
		must(t, w.change(func(t *dropTenant) { t.Next = 0 }))
		must(t, w.Pace(perSecond, time.Hour))
		if dropped, pass := sends(); dropped > packets-ring || dropped < packets-pass {
			t.Errorf("%s: %d of %d packets were dropped, want %d to %d", name, dropped, packets, packets-pass, packets-ring)
		}
		if v := run(t, counter, frame("10.0.0.1"), 1); v != tcxNext {
			t.Errorf("at the host end: verdict %d, want next", v)
		}
		unowned, err := e.Others()
		must(t, err)
		run(t, p, frame("10.0.0.9"), packets)
		if now, err := e.Others(); err != nil || now-unowned != packets {
			t.Errorf("%s: %d packets for others arrived (%v), want %d", name, now-unowned, err, packets)
		}
		w.charged = true
		e.tenants = map[tenant.Key]*Drops{w.key: w}
		both, err := e.Others()
		must(t, err)
		run(t, p, frame("10.0.0.1"), packets)
		run(t, p, frame("10.0.0.9"), packets)
		if now, err := e.Others(); err != nil || now-both != 2*packets {
			t.Errorf("%s: %d packets for others arrived (%v), want %d with those of a charged one", name, now-both, err, 2*packets)
		}
		w.charged, e.tenants = false, nil
		must(t, w.Pace(perSecond, -time.Second))
		if dropped, _ := sends(); dropped > 0 {
			t.Errorf("%s: a pace that has lapsed dropped %d packets", name, dropped)
		}
		must(t, w.Pace(perSecond, time.Hour))
		must(t, w.Pace(0, time.Hour))
		if dropped, _ := sends(); dropped > 0 {
			t.Errorf("%s: without a pace %d packets were dropped", name, dropped)
		}
	}
}
