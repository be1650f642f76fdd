package decide

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// Details are measured while a reservation is missed and its container stalls, and at intervals to
// learn its usual wait, but not if neither is possible.
func TestLacks(t *testing.T) {
	stalled := func(by time.Duration) func(*Demand, map[container.ID]Neighbour) {
		return func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Pressure, d.Stalls = by, true }
	}
	none := func(d *Demand, _ map[container.ID]Neighbour) { d.Achieved.ReadIOPS = 0 }
	for _, c := range []struct {
		name    string
		at      int // the second; the last details were in second 0
		change  func(*Demand, map[container.ID]Neighbour)
		stolen  time.Duration
		want    bool
		watches bool // afterwards
	}{
		{"met", 4, nil, 0, false, false},
		{"met, a while later", 5, nil, 0, true, false},
		{"another reservation", 1, func(d *Demand, _ map[container.ID]Neighbour) { d.Reserved.ReadIOPS = 999 }, 0, true, false},
		{"idle", 5, none, 0, false, false},
		{"missed and stalled", 1, stalled(10 * ms), 0, true, true},
		{"missed, and hardly stalled", 1, stalled(9 * ms), 0, false, false},
		{"missed, and the hypervisor had a CPU", 1, stalled(0), 10 * ms, true, true},
		{"missed, and stalls are not counted", 1, func(d *Demand, _ map[container.ID]Neighbour) { slow(d) }, 0, true, true},
	} {
		var control Control
		control.Next(window(0, nil))
		w := window(c.at, c.change)
		w.Detailed, w.Stolen = false, c.stolen
		testkit.Same(t, c.name, c.want, control.Lacks(w))
		control.Next(w)
		testkit.Same(t, c.name+": watches", c.watches, control.Watches(w.Taken))
		if w.Detailed = true; control.Lacks(w) {
			t.Errorf("%s: it has details, and lacks some", c.name)
		}
		if control.Watches(w.Taken.Add(detailAfter)) {
			t.Errorf("%s: it is watched for ever", c.name)
		}
	}
	if (&Control{}).Lacks(Window{}) {
		t.Error("a window without a length lacks details")
	}
}

// A window without details changes no usual wait, and ends no help.
func TestWithoutDetails(t *testing.T) {
	var control Control
	wait := func(at int, detailed bool, change func(*Demand)) Standing {
		w := window(at, func(d *Demand, _ map[container.ID]Neighbour) {
			if d.May = auto; detailed {
				d.Waited[keeper] = 100 * ms
			}
			if change != nil {
				change(d)
			}
		})
		w.Detailed, w.CPUs = detailed, 2
		control.Next(w)
		return control.standing[Place{victim, disk}]
	}
	for at := range 6 {
		if s := wait(at, at%5 == 0, nil); !s.known || s.usual != 100*time.Microsecond {
			t.Errorf("second %d: it usually waits %v for each request (%v)", at, s.usual, s.known)
		}
	}
	wait(6, true, func(d *Demand) { slow(d); d.Waited[keeper] = 600 * ms })
	for at := 7; at < 40; at++ {
		if wait(at, false, nil); control.Actions()[victim].Help == "" {
			t.Fatalf("help ends in second %d, though nobody has seen that it is not needed", at)
		}
	}
	wait(40, true, func(d *Demand) { clear(d.Waited) })
	testkit.Same(t, "help by", policy.Help(""), control.Actions()[victim].Help)
}
