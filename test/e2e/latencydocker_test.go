package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// coverageOf returns the coverage of a container's packets of one protocol.
func (a *agent) coverageOf(name, direction, protocol string) (c api.LatencyCoverage, stages []api.LatencyStage, err error) {
	l, err := a.api.Latency(a.t.Context(), name, 0)
	if err != nil {
		return c, nil, err
	}
	for _, row := range l.Containers {
		for _, p := range row.Protocols {
			if row.Name == name && row.Direction == direction && p.Protocol == protocol {
				return p.Coverage, p.Stages, nil
			}
		}
	}
	return c, nil, nil
}

// records makes a container ping, and waits for the record of each packet to and from its peer, and
// of no other. Each record has its times between device and uplink, and between socket and uplink.
// records returns their number. Where the kernel has called no program for softirqs meanwhile,
// packets may lack a record.
func (a *agent) records(name, peer string, pings int, ping func()) (n int) {
	a.t.Helper()
	filter := api.LatencyFilter{Protocol: api.LatencyICMP, Peer: netip.MustParsePrefix(peer + "/32")}
	first, err := a.api.LatencyRecords(a.t.Context(), name, filter, 0)
	must(a.t, err)
	softirqs := testkit.WatchSoftirqs(a.t)
	ping()
	filter.After = first.Next
	const late = 10 * time.Second // a record that is missing by then does not come
	pinged := time.Now()
	await(a.t, fmt.Sprintf("%d pings of %s to be recorded", pings, name), func() error {
		got, err := a.api.LatencyRecords(a.t.Context(), name, filter, 0)
		if err != nil {
			return err
		}
		seen := make(map[string]int)
		for _, r := range got.Records {
			asked := r.Direction == "ingress" && r.Type != 0 // the kernel answers: no socket gets it
			if r.Added == nil || *r.Added < 0 || !asked && (r.Stack == nil || *r.Stack < *r.Added) {
				a.t.Fatalf("%s: %+v", name, r)
			}
			seen[r.Direction]++
		}
		n = len(got.Records)
		if seen["egress"] == pings && seen["ingress"] == pings {
			return nil
		}
		c, _, _ := a.coverageOf(name, "ingress", api.LatencyICMP)
		err = fmt.Errorf("there are %v; lost %d, missed %d; ingress %+v", seen, got.Lost, got.Missed, c)
		if seen["egress"] <= pings && seen["ingress"] <= pings && time.Since(pinged) > late && softirqs.Missed() > 0 {
			a.t.Logf("%s: %v, and the kernel called no BPF program for %d network softirqs", name, err, softirqs.Missed())
			return nil
		}
		return err
	})
	return n
}

// latencyIs waits until latency measures a container.
func (a *agent) latencyIs(name string) {
	a.t.Helper()
	await(a.t, name+" to be measured", func() error {
		l, err := a.api.Latency(a.t.Context(), name, 0)
		if err == nil && len(l.Containers) == 0 {
			err = errors.New("it is not")
		}
		return err
	})
}

// swarmLatency measures packets between two engines on their overlay network: the inner packets, at
// both ends.
func swarmLatency(t *testing.T, nodes [2]*testkit.Docker, agents [2]*agent) {
	t.Helper()
	const packets = 10
	var addr string
	for n, d := range nodes {
		name := fmt.Sprintf("timed%d", n)
		d.Must(t, "run", "-d", "--name", name, "--network", testkit.SwarmNetwork, "--label", "fairlead.latency=on", d.Image, "sleep", "1000")
		agents[n].latencyIs(name)
		addr = d.Must(t, "inspect", "--format", "{{(index .NetworkSettings.Networks \""+testkit.SwarmNetwork+"\").IPAddress}}", name)
	}
	await(t, "the overlay to know the address", func() error {
		_, err := nodes[0].Run("exec", "timed0", "ping", "-c", "1", "-W", "5", addr)
		return err
	})
	back := nodes[0].Must(t, "inspect", "--format", "{{(index .NetworkSettings.Networks \""+testkit.SwarmNetwork+"\").IPAddress}}", "timed0")
	agents[0].records("timed0", addr, packets, func() {
		agents[1].records("timed1", back, packets, func() {
			nodes[0].Must(t, "exec", "timed0", "ping", "-c", fmt.Sprint(packets), "-i", "0.02", "-W", "30", addr)
		})
	})
	for n, d := range nodes {
		d.Must(t, "rm", "-f", fmt.Sprintf("timed%d", n))
	}
}
