package agent

import (
	"context"
	"net/http"
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic"
)

// shaper divides the uplinks. Feature traffic is one.
type shaper interface {
	Read() traffic.Reading
}

// Traffic says what bandwidth each container is due and gets, or the one that
// ref names.
func (a *Agent) Traffic(_ context.Context, ref string) (api.Traffic, error) {
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
	r := a.shaper.Read()
	if ref != "" {
		r = rowsOf(r, only.ID)
	}
	return wireTraffic(r, a.set.Lookup), nil
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
			Guaranteed: row.Guaranteed, Ceil: row.Ceil, Level: row.Level,
			Bytes: row.Bytes, Packets: row.Packets, Borrowed: row.Borrowed, Drops: row.Drops, Overlimits: row.Overlimits,
			BacklogBytes: row.Backlog, BacklogPackets: row.Queued,
		}
		if row.Container != 0 {
			is, _ := lookup(row.Container)
			c.Name = is.Name
			c.Asked = &api.TrafficAsked{
				Rate: row.Asked.Rate, Ceil: row.Asked.Ceil, Weight: uint64(row.Asked.Weight), Priority: row.Asked.Priority,
				Latency: row.Asked.Latency.Seconds(),
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
