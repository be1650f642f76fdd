package agent

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
)

// shaper divides the uplinks. Feature traffic is one.
type shaper interface {
	Read() traffic.Reading
	Measure(context.Context, time.Duration) (traffic.Measured, error)
}

// Traffic says what bandwidth each container is due and gets, or the one that
// ref names; after the time over, if that is not 0, and how long packets waited
// meanwhile.
func (a *Agent) Traffic(ctx context.Context, ref string, over time.Duration) (api.Traffic, error) {
	var only container.Container
	if ref != "" {
		c, _, err := a.find(ref)
		if err != nil {
			return api.Traffic{}, err
		}
		only = c
	}
	if a.shaper == nil {
		return api.Traffic{}, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "bandwidth is not divided: not available in this build"}
	}
	if over == 0 {
		return a.wireTraffic(a.shaper.Read(), only.ID), nil
	}
	m, err := a.shaper.Measure(ctx, over)
	if err != nil {
		return api.Traffic{}, err
	}
	t := a.wireTraffic(m.Reading, only.ID)
	t.Measured = &api.TrafficMeasured{Seconds: over.Seconds(), Missed: m.Missed}
	if m.Err != nil {
		t.Measured.Error = m.Err.Error()
	}
	return t, nil
}

// wireTraffic puts a reading into the API's form: of all containers, or of one
// if only is not 0.
func (a *Agent) wireTraffic(r traffic.Reading, only container.ID) api.Traffic {
	if only != 0 {
		r = rowsOf(r, only)
	}
	return wireTraffic(r, a.set.Lookup)
}

// rowsOf gives the rows of one container, under its own name where others that
// share its network have them too.
func rowsOf(r traffic.Reading, id container.ID) traffic.Reading {
	own := traffic.Reading{Taken: r.Taken}
	for _, row := range r.Rows {
		if slices.Contains(row.Members, id) {
			row.Container = id
			own.Rows = append(own.Rows, row)
		}
	}
	return own
}

// wireTraffic puts a reading into the API's form.
func wireTraffic(r traffic.Reading, lookup func(container.ID) (container.Container, bool)) api.Traffic {
	t := api.Traffic{Taken: r.Taken, Classes: make([]api.TrafficClass, 0, len(r.Rows))}
	for _, row := range r.Rows {
		c := api.TrafficClass{
			Container: row.Container, Uplink: row.Uplink, Direction: string(row.Direction), Link: row.Link,
			Guaranteed: row.Guaranteed, Ceil: row.Ceil, Level: row.Level, Split: row.Split,
			Bytes: row.Bytes, Packets: row.Packets, Borrowed: row.Borrowed, Drops: row.Drops, Overlimits: row.Overlimits,
			BacklogBytes: row.Backlog, BacklogPackets: row.Queued,
		}
		if row.Container != 0 {
			is, _ := lookup(row.Container)
			c.Name = is.Name
			c.Asked = &api.TrafficAsked{
				Rate: row.Asked.Rate, Ceil: row.Asked.Ceil, Weight: uint64(row.Asked.Weight), Priority: row.Asked.Priority,
				Latency: row.Asked.Latency.Seconds(), Split: row.Asked.Split,
			}
		}
		if h := row.Delays; h != nil {
			c.Delay = &api.TrafficDelay{
				Packets: h.Count(),
				P50:     h.Quantile(0.5).Seconds(), P99: h.Quantile(0.99).Seconds(), P999: h.Quantile(0.999).Seconds(),
			}
		}
		t.Classes = append(t.Classes, c)
	}
	api.SortTraffic(t.Classes)
	return t
}

// selfTraffic gives a container's own classes; nil if it has none.
func selfTraffic(r traffic.Reading, c container.Container) *api.SelfTraffic {
	t := wireTraffic(rowsOf(r, c.ID), func(container.ID) (container.Container, bool) { return c, true })
	if len(t.Classes) == 0 {
		return nil
	}
	return &api.SelfTraffic{Taken: t.Taken, Classes: t.Classes}
}
