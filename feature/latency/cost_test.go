package latency

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The cost of a stamp is measured at each hook that a packet passes, only while records are
// requested.
func TestOwnCost(t *testing.T) {
	testkit.NeedRoot(t)
	h := newHost(t)
	h.bridge()
	web, c := h.add("web", "10.66.0.2/24", h.ns)
	h.f.cfg.Containers = known{}
	h.measure(true, c)
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", 20)
	costs, err := h.f.meter.costs()
	must(t, err)
	if got := wireCosts(costs); got != nil || h.read(c).Of(Egress, UDP).Matched == 0 {
		t.Errorf("timed, though nobody asks for records: %+v", got)
	}
	_, err = h.f.Command(t.Context(), &c, api.Ask{Body: api.LatencyFilter{}})
	must(t, err)
	h.ask(web, h.wire, "udp", "10.66.0.1:9001", 20)
	h.await(func() string {
		out, err := h.f.Command(t.Context(), &c, api.Ask{Body: api.LatencyFilter{}, Over: time.Second})
		must(t, err)
		got := out.(api.LatencyRecords).OwnCost
		if len(got) != 4 {
			return fmt.Sprintf("not all hooks have been timed: %+v", got)
		}
		for _, of := range got {
			if of.Stamps == 0 || of.P50 <= 0 || of.P50 > 1 {
				t.Errorf("%+v", of)
			}
		}
		return ""
	})
}
