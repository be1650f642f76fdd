package drop

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// A ring of packets may wait for a tenant with a used-up quota or limit: a request is answered
// late, and none is lost (Iron, section 3.2).
func TestEarlyDropWaits(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w, err := e.add(another(e), 1)
	must(t, err)
	counter, driver := count(t, e, w), native(t, e, lo)
	run(t, counter, frame("10.0.0.1"), 1)
	seen(t, e)
	must(t, e.maps.FlCharges.Put(uint32(7), int64(0)))
	for name, spent := range map[string]dropTenant{
		"quota":                    {Stopped: ahead},
		"limit":                    {Account: 7, Limit: -1, Until: ahead},
		"limit, nothing in a ring": {Account: 7, Limit: -1, Until: ahead, NoRing: 1},
	} {
		spent.Retried, spent.Waits = ahead, ahead
		at := func(waiting uint64) dropTenant { spent.Waiting = waiting; return spent }
		for _, c := range []struct {
			when string
			dropTenant
			p       *ebpf.Program
			want    uint32
			waiting uint64
		}{
			{"the first", at(0), counter, tcxNext, 1},
			{"the last", at(ring - 1), counter, tcxNext, ring},
			{"one too many", at(ring), counter, tcxDrop, ring},
			// It passes the host end next, and is counted there.
			{"the first, at the uplink", at(0), e.tc, tcxNext, 0},
			{"the first, at the driver", at(0), driver, tcxNext, 0},
			{"one too many, at the uplink", at(ring), e.tc, tcxDrop, ring},
			{"one too many, at the driver", at(ring), driver, tcxDrop, ring},
		} {
			must(t, e.maps.FlTenants.Put(w.slot, c.dropTenant))
			if v := run(t, c.p, frame("10.0.0.1"), 1); v != c.want {
				t.Errorf("%s, %s: verdict %d, want %d", name, c.when, v, c.want)
			}
			after, err := w.read()
			if err != nil || after.Waiting != c.waiting {
				t.Errorf("%s, %s: %d wait, want %d (%v)", name, c.when, after.Waiting, c.waiting, err)
			}
			if held := c.want == tcxDrop && c.p != counter; held != (after.Held == 1) || after.Held > after.Arrived {
				t.Errorf("%s, %s: %d of %d that arrived are held at an uplink", name, c.when, after.Held, after.Arrived)
			}
		}
		// A period later there is room again, whether or not a poll has come between.
		old := at(ring)
		old.Waits = 1
		must(t, e.maps.FlTenants.Put(w.slot, old))
		if v := run(t, counter, frame("10.0.0.1"), 1); v != tcxNext {
			t.Errorf("%s, a period later: verdict %d, want next", name, v)
		}
	}
}

// ahead is ahead of the clock of any machine; ring is the size of a veth's.
const (
	ahead = uint64(100 * 365 * 24 * time.Hour)
	ring  = 256
)

// limited is limit for a tenant without room for waiting packets.
func limited(t *testing.T, w *Drops, account uint32, sum int64, lasts time.Duration) {
	t.Helper()
	must(t, w.limit(account, sum, lasts))
	must(t, w.change(func(e *dropTenant) { e.Waits, e.Waiting = ahead, ring }))
}
