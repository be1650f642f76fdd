package traffic

import (
	"cmp"
	"context"
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Report implements feature.Reporter: the bandwidth that each container is due and gets. If
// ask.Over is not 0, it measures queueing delays for that time.
func (f *Traffic) Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	var m Measured
	if ask.Over == 0 {
		m.Reading = f.Read()
	} else {
		var err error
		if m, err = f.Measure(ctx, ask.Over); err != nil {
			return nil, err
		}
	}
	r := m.Reading
	sharer := container.ID(0)
	if of != nil {
		if own := rowsOf(r, of.ID); len(own.Rows) > 0 {
			r = own
		} else {
			r, sharer = rowsShared(r, *of)
		}
	}
	t := wire(r, f.cfg.Containers.Lookup)
	if sharer != 0 {
		t.Sharer = cmp.Or(nameOf(f.cfg.Containers.Lookup(sharer)), sharer.String())
	}
	if ask.Over != 0 {
		t.Measured = &api.TrafficMeasured{Seconds: ask.Over.Seconds(), Missed: m.Missed}
		if m.Err != nil {
			t.Measured.Error = m.Err.Error()
		}
	}
	return t, nil
}

// rowsOf returns the rows of one container, under its own id where it shares them with others.
func rowsOf(r Reading, id container.ID) Reading {
	own := Reading{Taken: r.Taken}
	for _, row := range r.Rows {
		if slices.Contains(row.Members, id) {
			row.Container = id
			own.Rows = append(own.Rows, row)
		}
	}
	return own
}

// rowsShared returns the rows of the network of a container without a policy of its own, and the
// container whose policy they follow, or 0.
func rowsShared(r Reading, of container.Container) (shared Reading, by container.ID) {
	shared.Taken = r.Taken
	for _, row := range r.Rows {
		if key := identity.TenantOf(of); key != (identity.Tenant{}) && row.tenant == key {
			shared.Rows, by = append(shared.Rows, row), row.Container
		}
	}
	return shared, by
}

func nameOf(c container.Container, _ bool) string { return c.Name }

// wire converts a reading to the API's form.
func wire(r Reading, lookup func(container.ID) (container.Container, bool)) api.Traffic {
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

// SelfReport implements feature.SelfReporter: a container sees its own classes.
func (f *Traffic) SelfReport(context.Context) func(container.Container, *api.SelfReports) {
	r := f.Read()
	return func(c container.Container, out *api.SelfReports) {
		t := wire(rowsOf(r, c.ID), func(container.ID) (container.Container, bool) { return c, true })
		if len(t.Classes) > 0 {
			out.Traffic = &api.SelfTraffic{Taken: t.Taken, Classes: t.Classes}
		}
	}
}
