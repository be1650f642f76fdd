package account

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// From one container to another, or from the host: the receiver pays for its part. A packet that is
// received in the time of its sender's task, such as a request that crosses no NIC, robs no
// container: the meter distinguishes the sender from a task that only was on the CPU.
func TestPeers(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	client, server, other := f.add("client", 2), f.add("server", 3), f.add("other", 4)
	r := f.receive(server, 0, ":9000")
	for i, sender := range []*sandbox.Box{client, f.host} {
		t.Run("from "+sender.Name, func(t *testing.T) {
			f.begin(t)
			f.send(sender, 1, packets, "udp-send", "10.66.0.3:9000")
			f.got(r, uint64(packets*(1+i)))
			f.expect(func(d delta) {
				d.received(server, UDP, packets, packets*sizeUDP4)
				if w := d.of(server).Send[UDP]; w != (Work{}) {
					d.t.Errorf("for sending the receiver is charged %+v", w)
				}
				d.robs(server)
				d.spares(server, f.ids[sender]) // of the host: 0
				d.nothing(other)
				if sender == f.host {
					return
				}
				d.sent(client, UDP, packets, packets*sizeUDP4)
				if a := d.of(client); a.Own <= 0 || a.Receive[UDP] != (Work{}) {
					d.t.Errorf("in its own time the sender has %v; for receiving it is charged %+v", a.Own, a.Receive[UDP])
				}
			})
		})
	}
}

// spares checks that most of the sender's time that packets take is said to be its own doing.
func (d delta) spares(culprit *sandbox.Box, sender container.ID) {
	d.t.Helper()
	peer, task := d.stole(culprit, Party{sender, Peer}), d.stole(culprit, Party{sender, Task})
	// Late interrupts of the sender, by a timer for example, are in a task's time.
	if peer == 0 || task > peer/4 {
		d.t.Errorf("of the sender's time %v are said to be its own doing, and %v stolen", peer, task)
	}
}

// The same holds in windows, in which packets carry no stamps.
func TestPeersWithoutStamps(t *testing.T) {
	m := byHand(t)
	f := newFabric(t, m)
	client, server := f.add("client", 2), f.add("server", 3)
	r := f.receive(server, 0, ":9000")
	must(t, m.turn(full))
	f.begin(t)
	f.send(client, 1, packets, "udp-send", "10.66.0.3:9000")
	f.got(r, packets)
	f.expect(func(d delta) { d.spares(server, f.ids[client]) })
	if m.stamping {
		t.Error("packets are stamped")
	}
	must(t, m.turn(idle))
}

// stole returns a victim's time that a box's packets took.
func (d delta) stole(culprit *sandbox.Box, v Party) time.Duration {
	return d.thefts[Theft{Victim: v, Culprit: d.l.ids[culprit]}]
}
