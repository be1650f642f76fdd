package blockio

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
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
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[monitor.System] = 600 * ms }, "what the host does"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[victim] = 600 * ms }, "more CPUs"},
		{func(*Demand, map[container.ID]Neighbour) {}, "no more than the disk does"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[monitor.Quota], d.Quota = 600*ms, "/pod" }, "raise the CPU quota of /pod"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[monitor.Quota] = 600 * ms }, "raise the CPU quota of its cgroup or of one above"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[monitor.Realtime] = 600 * ms }, "io.realtime"},
		{func(d *Demand, _ map[container.ID]Neighbour) { d.Waited[monitor.Stolen] = 600 * ms }, "hypervisor"},
	} {
		var control Control
		control.Next(window(0, func(d *Demand, ns map[container.ID]Neighbour) { slow(d); c.change(d, ns) }))
		if s := control.standing[Place{victim, disk}]; !strings.Contains(s.Mend, c.mend) {
			t.Errorf("%s (%s): %q, want %q", s.State, s.Evidence, s.Mend, c.mend)
		}
	}
}

// The quota that held a container back the most is that of its own cgroup or of one above.
func TestQuotaOf(t *testing.T) {
	before := reading{Reading: monitor.Reading{Taken: second(0)}, delays: map[container.ID]delays{
		victim: {throttled: map[string]time.Duration{"/pod/db": time.Second, "/pod": time.Minute}},
	}}
	now := reading{Reading: monitor.Reading{Taken: second(1)}, delays: map[container.ID]delays{
		victim: {throttled: map[string]time.Duration{"/pod/db": 1100 * ms, "/pod": time.Minute + 500*ms, "/new": time.Hour}},
	}}
	d := since(now, before).delays[victim]
	if got := d.quota(); got != "/pod" || d.throttled["/pod"] != 500*ms || d.throttled["/pod/db"] != 100*ms {
		t.Errorf("quota of %q, %v", got, d.throttled)
	}
	if got := (delays{}).quota(); got != "" {
		t.Errorf("quota of %q of one without", got)
	}
}

// A budget of a second is used up for so long that no wait for it may end within a window.
func TestHeldForLong(t *testing.T) {
	var control Control
	for at, held := range []time.Duration{900 * ms, 0, 1800 * ms, 0, 0, 0} {
		control.Next(window(at, func(d *Demand, _ map[container.ID]Neighbour) {
			slow(d)
			d.Waited[monitor.Realtime], d.Waited[burner] = held, 60*ms
		}))
		s, want := control.standing[Place{victim, disk}], stateThrottled
		if at > 3 {
			want = stateContended
		}
		if s.State != want || !strings.Contains(s.Evidence, "real-time budget") && at <= 3 {
			t.Errorf("after %d s: %s (%s), want %s", at, s.State, s.Evidence, want)
		}
	}
}

// A reservation that is missed is in force in part only: the status says why and what would
// mend it, and is brought up to date when that changes, but not each second.
func TestMissedIsPartly(t *testing.T) {
	h := newHost(t)
	l := h.disk(2000)
	c, _ := h.container("db")
	ctx, want := t.Context(), target(t, c, "io.reserve: "+l.Path+" riops=1000")
	must(t, h.Apply(ctx, want))
	at := Place{c.ID, h.members[c.ID].reserved[0].at()}
	var told []container.ID
	h.Notify(func(id container.ID) { told = append(told, id) })
	for _, x := range []struct {
		after   time.Duration
		state   string
		mend    string
		changed bool
	}{
		{0, stateMet, "", false},
		{time.Second, stateContended, `let "x" yield`, true},
		{2 * time.Second, stateContended, `let "x" yield`, false},
		{3 * time.Second, stateMet, "", false},
		{4 * time.Second, stateContended, `let "x" yield`, false},
		{5 * time.Second, stateThrottled, "raise the quota", false},
		{6 * time.Second, stateThrottled, "raise the quota", true},
		{12 * time.Second, stateLess, "", true},
		{20 * time.Second, stateIdle, "", false},
	} {
		h.control.standing = map[Place]Standing{at: {State: x.state, Evidence: "300 of 1000 reads a second", Mend: x.mend}}
		h.tellMissed(second(0).Add(x.after))
		if changed := slices.Equal(told, []container.ID{c.ID}); changed != x.changed {
			t.Errorf("after %v: told of %v, want that it has changed: %v", x.after, told, x.changed)
		}
		told = nil
		err := h.Apply(ctx, want)
		if (err == nil) != (x.mend == "") || err != nil && (!errors.Is(err, feature.ErrPartly) ||
			!strings.Contains(err.Error(), l.Path+" is "+x.state+": 300 of 1000 reads a second; "+x.mend)) {
			t.Errorf("after %v: %v", x.after, err)
		}
		out := h.report().Reservations[0]
		if out.State != x.state || out.Mend != x.mend {
			t.Errorf("after %v: %+v", x.after, out)
		}
	}
	h.failed = "no BTF"
	if err := h.unmet(want); !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), "not known: no BTF") {
		t.Errorf("while nothing is measured: %v", err)
	}
	must(t, h.Remove(ctx, c.ID))
}
