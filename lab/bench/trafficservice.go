package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// serving is real servers that answer clients outside by the NIC: alone, and beside a
// neighbour that sends as much as it can. All containers are on CPU 0, the clients on CPU 1.
func serving() []trafficSetup {
	set := rules{"many": "{net.weight: 1, net.priority: 1}", "server": "{net.rate: 400mbit, net.priority: 0, net.latency: 2ms}"}
	tc := []rig.Class{{Container: 0, Rate: 500 * mbit, Ceil: gbit, Prio: 1}, {Container: 1, Rate: 400 * mbit, Ceil: gbit}}
	neighbours := []struct {
		name string
		send []sending
	}{{"alone", nil}, {"beside bulk", []sending{bulk("many", 6)}}, {"beside super-packets", []sending{superflood("many")}}}
	var all []trafficSetup
	for _, quota := range []float64{0, 50} {
		su := trafficSetup{name: "service", path: rig.NIC, link: gbit, boxes: []string{"many", "server"}}
		if quota > 0 {
			su.name, su.quotas = fmt.Sprintf("service %v", quota), map[string]float64{"server": quota}
		}
		for _, s := range []rig.Service{rig.Redis, rig.Nginx} {
			for _, n := range neighbours {
				server := sending{name: "server", rate: load.Flood, service: s, size: rig.PageSize}
				su.cases = append(su.cases, trafficCase{
					name: string(s) + " " + n.name, send: append(n.send, server), probe: "server", set: set, tc: tc,
				})
			}
		}
		if quota == 0 {
			su.cases = append(su.cases, trafficCase{
				name: "nginx ceil", ceil: 100 * mbit,
				send: []sending{{name: "server", rate: load.Flood, service: rig.Nginx, size: rig.LargePage}},
				set:  rules{"server": "net.ceil: 100mbit"}, tc: []rig.Class{{Container: 1, Rate: 100 * mbit, Ceil: 100 * mbit}},
			})
		}
		all = append(all, su)
	}
	return all
}

// ask gives a flow with a server a client with new connections, paused. The connections of the last
// arm may have been starved. They would send again only after a time that doubles each time (RFC
// 6298, 5.5), so ask waits for their end as long as they may have been starved.
func (s *trafficSession) ask(ctx context.Context, f *flow) error {
	if f.service == "" {
		return nil
	}
	if old := f.from; old != nil {
		f.from = nil
		if err := old.Stop(); err != nil {
			return err
		}
		for start := time.Now(); rig.Connected(f.server.PID) && time.Since(start) < 2*(s.settle+s.take); {
			if err := sleep(ctx, settleStep); err != nil {
				return err
			}
		}
	}
	var err error
	f.from, err = s.rig.Ask(ctx, f.service, s.setup.box(f.name), s.rig.Outside, serviceConns, f.size)
	return err
}

// retransmitted returns how many segments the server of a case and its client have retransmitted so
// far; 0 if there is no server.
func (s *trafficSession) retransmitted(c trafficCase) (uint64, error) {
	f := s.load[c.probe]
	if f == nil || f.server == nil {
		return 0, nil
	}
	return rig.Retransmitted(f.server.PID, f.from.PID)
}

// served returns the figures of a window of a server's client. If fewer requests were answered than
// the client has connections, the other requests have waited for the whole window.
func served(w load.Window, retransmitted uint64) []figure {
	answered := float64(w.Ops)
	all := max(answered, serviceConns)
	took := func(q float64) float64 {
		if q*all > answered {
			return w.Seconds
		}
		return w.Latency(q * all / answered).Seconds()
	}
	return []figure{
		{Requests, "1/s", w.Rate()}, {P50, "s", took(0.5)}, {P99, "s", took(0.99)}, {Longest, "s", took(1)},
		{Retransmitted, "1", float64(retransmitted)},
	}
}
