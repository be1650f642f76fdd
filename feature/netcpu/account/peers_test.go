package account

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// A packet that is received in the time of its sender's task, such as a request that crosses no
// NIC, robs no container: the meter distinguishes the sender from a task that only was on the CPU.
// The receiver pays all the same.
func TestPeers(t *testing.T) {
	testkit.InFull(t)
	m := exactMeter(t)
	for _, from := range []string{"a container", "the host"} {
		t.Run(from, func(t *testing.T) {
			f := newFabric(t, m)
			client, server := f.add("client", 2), f.add("server", 3)
			sender, id := client, f.ids[client]
			if from == "the host" {
				sender, id = f.host, container.ID(0)
			}
			r := f.receive(server, 0, ":9000")
			f.send(sender, 1, packets, "udp-send", "10.66.0.3:9000")
			f.got(r, packets)
			f.expect(func(d delta) {
				d.received(server, UDP, packets, packets*sizeUDP4)
				peer, task := d.stole(server, Party{id, Peer}), d.stole(server, Party{id, Task})
				// Late interrupts of the sender, by a timer for example, are in a task's time.
				if peer == 0 || task > peer/4 {
					d.t.Errorf("of the sender's time %v are said to be its own doing, and %v stolen", peer, task)
				}
			})
		})
	}
}

// The same holds in windows, in which packets carry no stamps.
func TestPeersWithoutStamps(t *testing.T) {
	m := byHand(t)
	f := newFabric(t, m)
	client, server := f.add("client", 2), f.add("server", 3)
	r := f.receive(server, 0, ":9000")
	must(t, m.turn(full))
	f.began = f.read()
	f.send(client, 1, packets, "udp-send", "10.66.0.3:9000")
	f.got(r, packets)
	f.expect(func(d delta) {
		peer, task := d.stole(server, Party{f.ids[client], Peer}), d.stole(server, Party{f.ids[client], Task})
		if peer == 0 || task > peer/4 {
			d.t.Errorf("of the sender's time %v are said to be its own doing, and %v stolen", peer, task)
		}
	})
	if m.stamping {
		t.Error("packets are stamped")
	}
	must(t, m.turn(idle))
}

// stole returns a victim's time that a box's packets took.
func (d delta) stole(culprit *sandbox.Box, v Party) time.Duration {
	return d.thefts[Theft{Victim: v, Culprit: d.l.ids[culprit]}]
}
