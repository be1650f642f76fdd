package traffic

import (
	"math"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/traffic/contend"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Losses add up from look to look, and count only between consecutive looks.
func TestContentionAddsUp(t *testing.T) {
	look := func(second int) map[int]contend.Uplink {
		n := uint64(second)
		s := netdev.Sender{Cookie: 7, Acked: n * 25e6, Busy: time.Duration(second) * time.Second, Unsent: 1, Room: 1e6, RTT: 8 * time.Millisecond, Least: time.Millisecond / 10}
		return map[int]contend.Uplink{2: {
			Taken: time.Unix(1_800_000_000+int64(second), 0),
			Stats: qdisc.Stats{Bytes: n * 125e6, Packets: n * 1e5, Backlog: 1e6}, Senders: map[uint64]contend.Sender{7: {Container: 1, Sender: s}},
		}}
	}
	names := map[int]string{2: "eth0"}
	var c contention
	for _, second := range []int{10, 11, 13} { // 0.8 of three seconds
		c.add(look(second), names)
	}
	c.add(nil, nil) // nothing waits
	c.add(look(20), names)
	c.add(look(21), names)
	if got := c.lost[lostAt{1, "eth0"}].seconds; math.Abs(got-3.2) > 1e-9 || len(c.lost) != 1 {
		t.Errorf("%v seconds lost, want 3.2; %+v", got, c.lost)
	}
}
