package traffic_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// BenchmarkMany measures one change where many containers have a policy, so that every class of the
// uplink changes. The first figure is the time until all had come, one after the other.
func BenchmarkMany(b *testing.B) {
	for _, tt := range []struct {
		tenants int
		ingress bool
	}{{100, false}, {100, true}, {1000, false}} {
		b.Run(fmt.Sprintf("%d tenants, both directions %v", tt.tenants, tt.ingress), func(b *testing.B) {
			h := newHost(b, 10*gbit)
			h.start()
			apply := func(i int, weight uint32) {
				n := policy.Net{Weight: weight}
				in := policy.Net{}
				if tt.ingress {
					in = n
				}
				must(b, h.due(fake(container.ID(i)), n, in))
			}
			start := time.Now()
			for i := range tt.tenants {
				apply(i+1, 1)
			}
			all := time.Since(start)
			weight := uint32(1)
			for b.Loop() {
				weight++
				apply(1, weight)
			}
			b.ReportMetric(all.Seconds(), "s-for-all")
			b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/change")
			if n := len(h.classes()); n != tt.tenants+2 {
				b.Errorf("%d classes", n)
			}
			start = time.Now()
			must(b, h.traffic.Remove(b.Context(), fake(2).ID))
			b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/removal")
		})
	}
}

// Each of many tenants has a class of its own, and all go without a trace.
func TestManyTenants(t *testing.T) {
	n := testkit.Scale(t, 100, 1000)
	h := newHost(t, 10*gbit)
	h.start()
	for i := range n {
		// A guarantee changes no other class, a weight changes all.
		must(t, h.apply(fake(container.ID(i+1)), policy.Net{Rate: 5 * mbit}))
	}
	if got := len(h.classes()); got != n+2 {
		t.Errorf("%d classes for %d tenants", got, n)
	}
	before := h.journal.Entries()
	must(t, h.apply(fake(container.ID(n/2)), policy.Net{Rate: 5 * mbit}))
	if after := h.journal.Entries(); len(after) != len(before) {
		t.Errorf("%d entries, had %d", len(after), len(before))
	}
	for i := range n {
		must(t, h.traffic.Remove(t.Context(), fake(container.ID(i+1)).ID))
	}
	if left := h.journal.Entries(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}

// All slots are taken: the next tenant is refused with the reason, and the others go on as before.
func TestEverySlotTaken(t *testing.T) {
	h := newHost(t, gbit)
	h.start()
	must(t, h.apply(fake(1), policy.Net{Weight: 1}))
	for i := range uint64(identity.Max) - 1 {
		if _, err := h.slots.Take(identity.Tenant{NetNS: 1<<50 + i}); err != nil {
			t.Fatal(err)
		}
	}
	before, entries := h.state(), len(h.journal.Entries())
	if err := h.apply(fake(2), policy.Net{Weight: 1}); !errors.Is(err, identity.ErrFull) {
		t.Errorf("no slot is left: %v, want ErrFull", err)
	}
	if h.state() != before || len(h.journal.Entries()) != entries || len(h.classes()) != 3 {
		t.Errorf("refused, but changed: classes %v\n%swas\n%s%+v", h.classes(), h.state(), before, h.journal.Entries())
	}
	must(t, h.apply(fake(1), policy.Net{Rate: 100 * mbit}))
	if got := h.classes(); got[1] != 100*mbit {
		t.Errorf("who has a slot: classes %v", got)
	}
	must(t, h.traffic.Remove(t.Context(), fake(1).ID))
}
