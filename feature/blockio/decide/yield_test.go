package decide

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// The network is in the way if nobody else is and a CPU that serves the disk works for it;
// it is kept apart where policy leaves that to the agent, for longer each time.
func TestNetworkInTheWay(t *testing.T) {
	at := func(second int, works time.Duration, leave policy.Interrupts, change change) Window {
		w := window(second, func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Interrupts = leave
			if change != nil {
				change(d, ns)
			}
		})
		w.Network = map[Disk]time.Duration{disk: works}
		return w
	}
	for _, c := range []struct {
		name  string
		w     Window
		state string
		apart bool
	}{
		{"auto", at(0, 100*ms, policy.InterruptsAuto, nil), StateContended, true},
		{"off", at(0, 200*ms, policy.InterruptsOff, nil), StateContended, false},
		{"a little", at(0, 99*ms, policy.InterruptsAuto, nil), StateShort, false},
		{"met", at(0, 200*ms, policy.InterruptsAuto, asking(1000, 0, nil)), StateMet, false},
		{"a burner", at(0, 200*ms, policy.InterruptsAuto, of(func(d *Demand) { d.Waited[burner] = 600 * ms })), StateContended, false},
	} {
		var control Control
		control.Next(c.w)
		if s := control.standing[Place{victim, disk}]; s.State != c.state || control.Actions()[victim].Apart != c.apart {
			t.Errorf("%s: %+v, %+v", c.name, s, control.Actions())
		}
	}
	var control Control
	control.Next(at(0, 200*ms, policy.InterruptsAuto, nil))
	for _, x := range []struct {
		second int
		apart  bool
	}{{29, true}, {30, false}} {
		control.Next(at(x.second, 0, policy.InterruptsAuto, nil))
		testkit.Same(t, fmt.Sprintf("after %d s: apart", x.second), x.apart, control.Actions()[victim].Apart)
	}
	control.Next(at(40, 200*ms, policy.InterruptsAuto, nil))
	control.Next(at(99, 0, policy.InterruptsAuto, nil))
	if !control.Actions()[victim].Apart {
		t.Error("needed again at once, it is not held for longer")
	}
	control.Next(at(99, 200*ms, policy.InterruptsOff, nil))
	if got := control.Actions(); len(got) != 0 {
		t.Errorf("policy says off: %+v", got)
	}
}
