// Package viewtest makes frames of an imaginary host, for the tests of the views: many containers
// with changing figures, a victim, its culprit, and a container with strings that try to control a
// terminal or a page. It computes no overview.
package viewtest

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// Start is the time of the first frame of a Host.
var Start = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

// Hostile is a name that must not reach a terminal or a page unescaped.
const Hostile = "evil\x1b[31m\x1b]0;owned\a\u202e\u009b2J\x7f\r\n<script>alert(1)</script>\xff"

// The ids of the containers of every Host.
const (
	Victim  api.ID = 1 // db-1, slowed by Culprit
	Culprit api.ID = 2 // flood
	Evil    api.ID = 3 // Hostile
	Pods    api.ID = 4 // this and the next are the containers of one pod
)

// Host is a host with so many containers, at least 5.
type Host struct {
	Containers int
	Begin      time.Time     // when the first frame is taken; zero: Start
	Every      time.Duration // between two frames
	Calm       int           // so many frames at the start, the culprit does nothing
	Quiet      bool          // it never does
}

func name(id api.ID) string {
	switch id {
	case Victim:
		return "db-1"
	case Culprit:
		return "flood"
	case Evil:
		return Hostile
	case Pods, Pods + 1:
		return fmt.Sprintf("shop/cart-0/c%d", id-Pods)
	}
	return fmt.Sprintf("web-%02d", id)
}

// Taken returns the time of the i-th frame.
func (h Host) Taken(i int) time.Time {
	start := h.Begin
	if start.IsZero() {
		start = Start
	}
	return start.Add(time.Duration(i) * h.Every)
}

// Frame returns the i-th frame, from 0 on.
func (h Host) Frame(i int) api.Frame {
	start, taken := h.Taken(0), h.Taken(i)
	sec := h.Every.Seconds() * float64(i)
	busy := h.Every.Seconds() * float64(max(0, i-h.Calm))
	if h.Quiet {
		busy = 0
	}
	f := api.Frame{Taken: taken, Reports: api.Reports{
		NetCPU:  &api.NetCPU{Since: start, Taken: taken},
		Traffic: &api.Traffic{Taken: taken},
		Latency: &api.Latency{Taken: taken},
		BlockIO: &api.BlockIO{Taken: taken, Seconds: 1},
	}}
	for id := api.ID(1); id <= api.ID(h.Containers); id++ {
		n := float64(id)
		wave := float64((i*7+int(id)*3)%17) / 17 // another one for each container and frame
		c := api.Container{ID: id, Name: name(id), Source: "docker", Image: "registry.example.com/app:" + id.String(), PID: 100 + int(id), Started: start.Add(-time.Hour),
			Policy:   []api.Setting{{Key: "fairlead.net.rate", Value: "50mbit", From: "label"}},
			Features: []api.FeatureStatus{{Feature: "traffic", Asked: true, State: api.StateDone, Since: start}, {Feature: "netcpu", Asked: true, State: api.StateError, Error: "no\x1b[2J", Tries: 2}}}
		account := api.NetCPUAccount{Container: id, Name: name(id), Tasks: sec*0.05*n/10 + wave*0.01, Receive: sec*0.002 + wave*0.001, Send: sec * 0.001}
		switch id {
		case Victim:
			c.Image = "postgres:16"
			account.Tasks = sec * 0.8
			account.Stolen = busy * 0.184
			if busy > 0 {
				account.StolenBy = []api.NetCPUCulprit{{Container: Culprit, Name: name(Culprit), Seconds: busy * 0.16}, {Container: Evil, Name: Hostile, Seconds: busy * 0.024}}
			}
			c.Policy = append(c.Policy, api.Setting{Key: "fairlead.netcpu", Value: "isolate", From: "netcpu auto", Instead: "auto", Reason: "its packets took 18 % of others", Since: start.Add(-3 * time.Minute)})
		case Culprit:
			account.Receive += busy * 0.9
		case Evil:
			c.Source, c.Image, c.Labels = "cgroup", Hostile, map[string]string{Hostile: Hostile}
			c.Policy[0] = api.Setting{Key: Hostile, Value: Hostile, From: Hostile, Reason: Hostile, Instead: Hostile}
			c.Features[0] = api.FeatureStatus{Feature: Hostile, Asked: true, State: Hostile, Error: Hostile}
		case Pods, Pods + 1:
			c.Namespace, c.Pod = "shop", "cart-0"
		}
		f.Containers = append(f.Containers, c)
		f.NetCPU.Accounts = append(f.NetCPU.Accounts, account)
		for _, direction := range []string{"egress", "ingress"} {
			f.Traffic.Classes = append(f.Traffic.Classes, api.TrafficClass{Container: id, Name: name(id), Uplink: "eth0", Direction: direction, Guaranteed: 50e6,
				Bytes: uint64(sec*1e6*n) + uint64(wave*5e6), Packets: uint64(sec * 1000)})
			f.Latency.Containers = append(f.Latency.Containers, api.LatencyContainer{Container: id, Name: name(id), Direction: direction,
				LatencyTimes: api.LatencyTimes{Added: &api.LatencyStage{Stage: "added", Packets: 10, P99: 20e-6 + wave*1e-3}}})
		}
		f.BlockIO.Rows = append(f.BlockIO.Rows, api.BlockIORow{Container: id, Name: name(id), Disk: "vda", State: "met",
			Achieved: api.BlockIOFigures{ReadIOPS: uint64(1000 * wave), WriteIOPS: 10}, Reserved: &api.BlockIOFigures{ReadIOPS: 500}})
	}
	f.BlockIO.Events = []api.BlockIOEvent{{ID: 1, Time: start.Add(-5 * time.Minute), Victim: Victim, Name: name(Victim), Disk: "vda", What: "action", Culprit: Evil, Text: "its I/O is held back " + Hostile}}
	return f
}

// Recording is a recording of the first frames of a Host.
type Recording struct {
	Host  Host
	Count int
}

// Span returns the times of the first and the last frame.
func (r Recording) Span() (first, last time.Time) {
	return r.Host.Taken(0), r.Host.Taken(r.Count - 1)
}

// Frames yields the frames from one time to another, at least every apart.
func (r Recording) Frames(_ context.Context, from, to time.Time, every time.Duration) iter.Seq2[api.Frame, error] {
	return func(yield func(api.Frame, error) bool) {
		var last time.Time
		for i := range r.Count {
			t := r.Host.Taken(i)
			if t.Before(from) || !to.IsZero() && t.After(to) || t.Sub(last) < every {
				continue
			}
			last = t
			if !yield(r.Host.Frame(i), nil) {
				return
			}
		}
	}
}

// Live is a live source: each Next returns the next frame of a Host at once. It has no past.
type Live struct {
	Host  Host
	Count int
	Fail  error // the answer of Next, while it is not nil
}

// Next returns the next frame.
func (l *Live) Next(ctx context.Context) (api.Frame, error) {
	if l.Fail != nil {
		return api.Frame{}, l.Fail
	}
	l.Count++
	return l.Host.Frame(l.Count - 1), ctx.Err()
}

// Span returns zero times.
func (l *Live) Span() (first, last time.Time) { return first, last }

// Frames yields nothing.
func (l *Live) Frames(context.Context, time.Time, time.Time, time.Duration) iter.Seq2[api.Frame, error] {
	return func(func(api.Frame, error) bool) {}
}
