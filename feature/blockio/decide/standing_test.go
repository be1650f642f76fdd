package decide

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// What would mend a missed reservation depends on who is in the way, and on what was done.
func TestMend(t *testing.T) {
	for _, c := range []struct {
		change func(*Demand, map[container.ID]Neighbour)
		mend   string
	}{
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[burner] = 600 * ms }, `"burner" (2) is held back for it`},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[keeper] = 600 * ms }, `let "keeper" (5) yield: io.yield=auto`},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[other] = 600 * ms }, "both have reserved"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[System] = 600 * ms }, "what the host does"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[victim] = 600 * ms }, "more CPUs"},
		{func(*Demand, map[container.ID]Neighbour) {}, "no more than the disk does"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[Quota], d.Quota = 600*ms, "/pod" }, "raise the CPU quota of /pod"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[Quota] = 600 * ms }, "raise the CPU quota of its cgroup or of one above"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[Realtime] = 600 * ms }, "io.realtime"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[Stolen] = 600 * ms }, "hypervisor"},
	} {
		var control Control
		control.Next(window(0, func(d *Demand, ns map[container.ID]Neighbour) { slow(d); c.change(d, ns) }))
		if s := control.standing[Place{victim, disk}]; !strings.Contains(s.Mend, c.mend) {
			t.Errorf("%s (%s): %q, want %q", s.State, s.Evidence, s.Mend, c.mend)
		}
	}
}

// A budget of a second is used up for so long that no wait for it may end within a window.
func TestHeldForLong(t *testing.T) {
	var control Control
	for at, held := range []time.Duration{900 * ms, 0, 1800 * ms, 0, 0, 0} {
		control.Next(window(at, func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[Realtime], d.Waited[burner] = held, 60*ms
		}))
		s, want := control.standing[Place{victim, disk}], StateThrottled
		if at > 3 {
			want = StateContended
		}
		if s.State != want || !strings.Contains(s.Evidence, "real-time budget") && at <= 3 {
			t.Errorf("after %d s: %s (%s), want %s", at, s.State, s.Evidence, want)
		}
	}
}
