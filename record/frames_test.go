package record

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// host makes the frames of a host with containers that all work, as the agent would report them.
type host struct {
	rand  *rand.Rand
	frame api.Frame
}

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func newHost(containers int) *host {
	h := &host{rand: rand.New(rand.NewPCG(1, 2))}
	f := &h.frame
	f.Taken = epoch
	f.NetCPU = &api.NetCPU{Since: epoch}
	f.Traffic, f.BlockIO, f.Overlay = &api.Traffic{}, &api.BlockIO{}, &api.Overlay{Networks: []api.OverlayNetwork{}, Containers: []api.OverlayContainer{}}
	f.Latency = &api.Latency{}
	for i := range containers {
		id, name := api.ID(4000+37*i), fmt.Sprintf("shop-%d_app_%d", i/3, i%3)
		c := api.Container{
			ID: id, Name: name, Source: "docker", RuntimeID: fmt.Sprintf("%064x", 77777*i+1),
			Image: "registry.example.com/shop/app:1.27." + fmt.Sprint(i%5), PID: 1000 + i, Started: epoch.Add(-time.Duration(i) * time.Hour),
			Labels: map[string]string{
				"com.docker.compose.project": fmt.Sprintf("shop-%d", i/3), "com.docker.compose.service": "app", "com.docker.compose.version": "2.29.1",
				"com.docker.compose.config-hash": fmt.Sprintf("%064x", 99991*i+5), "org.opencontainers.image.source": "https://git.example.com/shop/app",
				"fairlead.net.rate": "50mbit", "fairlead.netcpu": "auto",
			},
			Cgroup: api.Cgroup{V2: fmt.Sprintf("/sys/fs/cgroup/system.slice/docker-%064x.scope", 77777*i+1)}, NetNS: 4026532000 + uint64(i),
			Interfaces: []api.Interface{{Name: "eth0", Index: 2, Kind: "veth", MAC: "02:42:ac:11:00:02", Addrs: []string{fmt.Sprintf("172.17.%d.%d/16", i/250, i%250)},
				Host: &api.HostEnd{NetNS: 4026531840, Name: fmt.Sprintf("veth%07x", 8191*i), Index: 100 + i, Master: "docker0"}}},
			Policy: []api.Setting{{Key: "fairlead.net.rate", Value: "50mbit", From: "label"}, {Key: "fairlead.netcpu", Value: "auto", From: "label"}},
		}
		for _, feature := range []string{"netcpu", "traffic", "latency", "overlay", "blockio"} {
			c.Features = append(c.Features, api.FeatureStatus{Feature: feature, State: api.StateDone, Since: epoch})
		}
		f.Containers = append(f.Containers, c)
		a := api.NetCPUAccount{Container: id, Name: name}
		for _, d := range []string{"receive", "send"} {
			for _, p := range []string{"tcp", "udp"} {
				a.Work = append(a.Work, api.NetCPUWork{Direction: d, Protocol: p})
			}
		}
		for j := range 4 {
			other := (i + 7*j + 1) % containers
			a.StolenBy = append(a.StolenBy, api.NetCPUCulprit{Container: api.ID(4000 + 37*other), Name: fmt.Sprintf("shop-%d_app_%d", other/3, other%3)})
			f.NetCPU.Matrix = append(f.NetCPU.Matrix, api.NetCPUTheft{Kind: api.VictimTask, Victim: id, VictimName: name, Culprit: api.ID(4000 + 37*other), CulpritName: fmt.Sprintf("shop-%d_app_%d", other/3, other%3)})
		}
		f.NetCPU.Accounts = append(f.NetCPU.Accounts, a)
		for _, d := range []string{"egress", "ingress"} {
			f.Traffic.Classes = append(f.Traffic.Classes, api.TrafficClass{Container: id, Name: name, Uplink: "eth0", Direction: d, Link: 1e9, Guaranteed: 5e7, Ceil: 1e9, Asked: &api.TrafficAsked{Rate: 5e7}})
		}
		f.BlockIO.Rows = append(f.BlockIO.Rows, api.BlockIORow{Container: id, Name: name, Disk: "vda", State: "best effort"})
	}
	return h
}

// next returns the frame after some time. It shares no memory with the ones before that changes.
func (h *host) next(after time.Duration) api.Frame {
	f := h.frame
	f.Taken = f.Taken.Add(after)
	sec := func(n *float64) { *n += float64(h.rand.IntN(200_000_000)) / 1e9 }
	num := func(n *uint64, most uint64) { *n += h.rand.Uint64N(most) }

	n := *f.NetCPU
	n.Taken = f.Taken
	sec(&n.Softirq)
	sec(&n.Charged)
	n.Accounts = append([]api.NetCPUAccount(nil), n.Accounts...)
	for i := range n.Accounts {
		a := &n.Accounts[i]
		for _, x := range []*float64{&a.Tasks, &a.Receive, &a.Send, &a.Own, &a.Stolen, &a.Taken} {
			sec(x)
		}
		a.Work = append([]api.NetCPUWork(nil), a.Work...)
		for j := range a.Work {
			w := &a.Work[j]
			sec(&w.Seconds)
			num(&w.Packets, 5000)
			num(&w.Bytes, 5e6)
			w.Each = w.Seconds * 1e9 / float64(w.Packets+1)
		}
		a.StolenBy = append([]api.NetCPUCulprit(nil), a.StolenBy...)
		for j := range a.StolenBy {
			sec(&a.StolenBy[j].Seconds)
		}
	}
	n.Matrix = append([]api.NetCPUTheft(nil), n.Matrix...)
	for i := range n.Matrix {
		sec(&n.Matrix[i].Seconds)
	}
	f.NetCPU = &n

	t := *f.Traffic
	t.Taken = f.Taken
	t.Classes = append([]api.TrafficClass(nil), t.Classes...)
	for i := range t.Classes {
		c := &t.Classes[i]
		num(&c.Bytes, 1e7)
		num(&c.Packets, 9000)
		num(&c.Borrowed, 100)
	}
	f.Traffic = &t

	b := *f.BlockIO
	b.Taken = f.Taken
	b.Rows = append([]api.BlockIORow(nil), b.Rows...)
	for i := range b.Rows {
		r := &b.Rows[i]
		r.Achieved = api.BlockIOFigures{ReadIOPS: h.rand.Uint64N(500), WriteIOPS: h.rand.Uint64N(500), ReadBytes: h.rand.Uint64N(1e7), WriteBytes: h.rand.Uint64N(1e7)}
		r.DeviceP50, r.DeviceP99 = float64(h.rand.IntN(1e6))/1e9, float64(h.rand.IntN(1e7))/1e9
	}
	f.BlockIO = &b
	h.frame = f
	return f
}

var must = testkit.Must
