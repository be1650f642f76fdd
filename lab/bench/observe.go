package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// observed measures the cost of the accounts: on is an agent that only keeps them, off is
// no agent. The victim and the receiver share the CPU without quotas. At the two rates most
// packets have a softirq of their own; in a flood a poll handles several. They take the victim's time,
// so the programs stay attached.
func observed() []setup {
	flood := demand{name: "flood", traffic: rig.Traffic{Kind: rig.UDP}, rate: load.Flood}
	at := func(rate uint64) demand {
		return demand{name: fmt.Sprintf("%dk", rate/1000), traffic: rig.Traffic{Kind: rig.UDP}, rate: rate}
	}
	var all []setup
	for _, path := range []rig.Path{rig.Hop, rig.NIC, rig.VXLAN} {
		all = append(all, setup{
			name: "accounts " + string(path),
			cfg:  rig.Config{Path: path, Containers: rig.Pair(100, 100)}, accounts: true,
			demands: []demand{at(2_000), at(20_000), flood},
		})
	}
	return all
}

// watched is what accounts cost a container whose packets take nobody's time: they are kept by
// windows there. Another container on its bridge, Docker's for example, sends it packets.
func watched() setup {
	su := calm()
	su.name = "watched"
	su.accounts, su.protect, su.settled = true, "", 3*time.Second
	su.demands = append(su.demands, demand{name: "flood", traffic: rig.Traffic{Kind: rig.Overrun, Within: true}, rate: load.Flood})
	return su
}

// watchedService is the same for a real server, which a container on its bridge asks.
func watchedService() setup {
	return setup{
		name: "watched nginx",
		cfg: rig.Config{Path: rig.NIC, Unsteered: true, Containers: []rig.Container{
			{Name: "server"}, {Name: "idle"}, {Name: "client", CPU: rig.SenderCPU},
		}},
		service: rig.Nginx, alone: true, accounts: true,
		demands: []demand{{name: "alone", idle: true}},
	}
}

// attended starts or stops the agent of a setup.
func (g *guard) attended(ctx context.Context, on bool) error {
	if on == (g.process != nil) {
		return nil
	}
	if !on {
		return g.stop()
	}
	return g.start(ctx)
}

// loss is the CPU time that the accounts cost the victim per packet, caches included: the
// difference of its work without and with them. ok is false if the two windows did not
// receive equally many packets, because then the difference has other causes, too.
func loss(base float64, off, on sample) (seconds float64, ok bool) {
	if base == 0 || on.received == 0 || off.received < on.received*0.99 || off.received > on.received*1.01 {
		return 0, false
	}
	return (off.work - on.work) / base / on.received, true
}
