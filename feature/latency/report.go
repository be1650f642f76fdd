package latency

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/tenant"
)

// Reading holds the counters of all measured tenants, each since it was first measured. The API's
// report, the container's own view and the samples are projections of it.
type Reading struct {
	api.Latency          // the counters of the host: no containers, no start
	Tenants     []Tenant // by container
	Uplinks     int      // number of uplinks
}

// Tenant holds the counters of one tenant.
type Tenant struct {
	Container container.ID // the member with the lowest id
	Members   []container.ID

	key     tenant.Key
	tallies *tallies
}

// Read reads the counters. It may be called at any time.
func (f *Latency) Read() (Reading, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := Reading{Latency: api.Latency{Taken: time.Now()}}
	if f.meter == nil {
		return r, nil
	}
	for _, t := range f.tenants.Tenants() {
		m := f.measured[t.Key()]
		if m == nil {
			continue
		}
		all, err := f.meter.read(m.slot)
		if err != nil {
			return r, err
		}
		ids := t.IDs()
		r.Tenants = append(r.Tenants, Tenant{Container: ids[0], Members: ids, key: t.Key(), tallies: all})
	}
	slices.SortFunc(r.Tenants, func(a, b Tenant) int { return cmp.Compare(a.Container, b.Container) })
	for _, index := range f.meter.ends.uplinks.at {
		if index != 0 {
			r.Uplinks++
		}
	}
	passed, evicted, err := f.meter.passed()
	if err != nil {
		return r, err
	}
	for _, n := range passed {
		r.Passed += n
	}
	r.Evicted = evicted
	r.Unwatched = f.meter.unwatched().Seconds()
	r.Lost, r.LostWaits, err = f.lost()
	return r, err
}

// Since returns the counters' growth after an earlier Reading.
func (r Reading) Since(before Reading) Reading {
	was := make(map[tenant.Key]Tenant) // not by container: it may have ended
	for _, t := range before.Tenants {
		was[t.key] = t
	}
	r.Tenants = slices.Clone(r.Tenants)
	for i, t := range r.Tenants {
		if b, known := was[t.key]; known {
			r.Tenants[i].tallies = t.tallies.since(b.tallies)
		}
	}
	if r.Passed >= before.Passed { // otherwise the meter was opened again
		r.Passed, r.Evicted, r.Lost = r.Passed-before.Passed, r.Evicted-before.Evicted, r.Lost-before.Lost
		r.LostWaits -= before.LostWaits
		r.Unwatched -= before.Unwatched
	}
	return r
}

// Report implements feature.Reporter. It returns the latency of packets over ask.Over, or since the
// beginning if that is 0.
func (f *Latency) Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	r, err := f.Read()
	if err != nil {
		return nil, err
	}
	var done work
	if ask.Over != 0 {
		before, worked := r, f.packetWork()
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(ask.Over):
		}
		if r, err = f.Read(); err != nil {
			return nil, err
		}
		r, done = r.Since(before), f.packetWork().since(worked)
		r.Latency.Since = before.Taken
	}
	if of != nil {
		r.Tenants = networkOf(r, *of)
	}
	out := r.Latency
	out.Containers = wire(r, f.cfg.Containers.Lookup)
	name := func(id container.ID) string {
		if id == 0 {
			return "system"
		}
		c, _ := f.cfg.Containers.Lookup(id)
		return c.Name
	}
	for i := range out.Containers {
		c := &out.Containers[i]
		if c.Direction == Ingress.String() {
			c.Meanwhile = done.meanwhile(tenantsOf(r, container.ID(c.Container))[0].Members, out.Taken.Sub(out.Since), name)
		}
	}
	return out, nil
}

// tenantsOf returns the tenant of one member, under the member's id.
func tenantsOf(r Reading, id container.ID) []Tenant {
	for _, t := range r.Tenants {
		if slices.Contains(t.Members, id) {
			t.Container = id
			return []Tenant{t}
		}
	}
	return nil
}

// networkOf is tenantsOf for a container that may not be a member. If policy measures only other
// containers of its tenant, networkOf returns the tenant under the id of one of these.
func networkOf(r Reading, c container.Container) []Tenant {
	if own := tenantsOf(r, c.ID); own != nil {
		return own
	}
	key := c.TenantKey()
	return slices.DeleteFunc(slices.Clone(r.Tenants), func(t Tenant) bool { return key == tenant.Key{} || t.key != key })
}

// wire converts the tenants to the API's form.
func wire(r Reading, lookup func(container.ID) (container.Container, bool)) []api.LatencyContainer {
	out := []api.LatencyContainer{}
	for _, t := range r.Tenants {
		c, known := lookup(t.Container)
		for d := range directions {
			row := api.LatencyContainer{
				Container: api.ID(t.Container), Name: c.Name, Direction: d.String(),
				LatencyTimes: times(t, d, every()...), Protocols: []api.LatencyProtocol{},
			}
			if known {
				row.Uncovered = gaps(c, d, r.Uplinks > 0)
			}
			for _, p := range every() {
				if t.Of(d, p) != (Coverage{}) {
					row.Protocols = append(row.Protocols, api.LatencyProtocol{Protocol: p.String(), LatencyTimes: times(t, d, p)})
				}
			}
			out = append(out, row)
		}
	}
	api.SortLatency(out)
	return out
}

func times(t Tenant, d Direction, of ...Protocol) api.LatencyTimes {
	c := t.Of(d, of...)
	out := api.LatencyTimes{
		Coverage: api.LatencyCoverage{
			Seen: c.Seen, Matched: c.Matched, Local: c.Local, Unsampled: c.Unsampled, Unmatched: c.Unmatched,
			Mismatched: c.Mismatched, Evicted: c.Evicted, Waiting: c.Waiting(),
		},
		Stages: []api.LatencyStage{},
	}
	stage := func(s Stage) *api.LatencyStage { // nil without packets
		h := t.Histogram(d, s, of...)
		n := h.Count()
		if n == 0 {
			return nil
		}
		return &api.LatencyStage{
			Stage: s.Name(d), Packets: n, Mean: h.Seconds() / float64(n),
			P50: h.Quantile(0.5).Seconds(), P90: h.Quantile(0.9).Seconds(), P99: h.Quantile(0.99).Seconds(), Max: h.Quantile(1).Seconds(),
		}
	}
	out.Added, out.Stack, out.Local = stage(Added), stage(Stack), stage(Local)
	for _, s := range way(d) {
		if st := stage(s); st != nil {
			out.Stages = append(out.Stages, *st)
		}
	}
	return out
}

// SelfReport implements feature.SelfReporter. A container sees its own packets only.
func (f *Latency) SelfReport(context.Context) func(container.Container, *api.SelfReports) {
	r, err := f.Read()
	return func(c container.Container, out *api.SelfReports) {
		own := r
		own.Tenants = tenantsOf(r, c.ID)
		if err != nil || len(own.Tenants) == 0 {
			return
		}
		self := func(container.ID) (container.Container, bool) { return c, true }
		out.Latency = &api.SelfLatency{Taken: r.Taken, Directions: wire(own, self)}
	}
}

// The bounds of latency_seconds double from 2^firstBound ns (1 us) to 2^lastBound ns (1.1 s).
const (
	firstBound = 10
	lastBound  = 30
)

// help is the help text of the samples.
var help = map[string]string{
	"latency_seconds":                 "Time that packets of the container took on this host, by stage; added and stack are sums of stages.",
	"latency_packets_total":           "Packets of the container that were looked at, by what became of the measurement.",
	"latency_passed_events_total":     "Times a packet was passed over on this host because a CPU had more than it measures.",
	"latency_evicted_packets_total":   "Packets on this host whose stamp was lost before their container was known.",
	"latency_unwatched_seconds_total": "Time in which no packet on this host was looked at, because there was a flood.",
	"latency_lost_records_total":      "Records of single packets for which the buffer had no room, or that were too many.",
	"latency_lost_waits_total":        "Waits of recorded packets that were overwritten, or for which the buffer had no room.",
}

// Snapshot implements feature.Feature: packets by the result of the measurement, and the histograms of
// the stages, both over all protocols, and counters of the host. It has no samples if no tenant is
// measured.
func (f *Latency) Snapshot() feature.Snapshot {
	r, err := f.Read()
	s := feature.Snapshot{Taken: r.Taken, Help: help}
	if err != nil {
		f.cfg.Log.Warn("read latency", "err", err)
		return s
	}
	for _, t := range r.Tenants {
		for d := range directions {
			add := func(x feature.Sample, label, value string) {
				x.Container, x.Labels = t.Container, []feature.Label{{Name: "direction", Value: d.String()}, {Name: label, Value: value}}
				s.Samples = append(s.Samples, x)
			}
			c := t.Of(d, every()...)
			for _, x := range []struct {
				result string
				n      uint64
			}{
				{"matched", c.Matched}, {"local", c.Local}, {"unsampled", c.Unsampled}, {"unmatched", c.Unmatched},
				{"mismatched", c.Mismatched}, {"evicted", c.Evicted},
			} {
				add(feature.Sample{Name: "latency_packets_total", Value: float64(x.n)}, "result", x.result)
			}
			for st := range stages {
				if h := t.Histogram(d, st, every()...); h.Count() > 0 {
					add(feature.Sample{Name: "latency_seconds", Histogram: h.Forms(firstBound, lastBound)}, "stage", st.Name(d))
				}
			}
		}
	}
	if len(r.Tenants) == 0 {
		return s
	}
	s.Samples = append(s.Samples,
		feature.Sample{Name: "latency_passed_events_total", Value: float64(r.Passed)},
		feature.Sample{Name: "latency_evicted_packets_total", Value: float64(r.Evicted)},
		feature.Sample{Name: "latency_lost_records_total", Value: float64(r.Lost)},
		feature.Sample{Name: "latency_lost_waits_total", Value: float64(r.LostWaits)},
		feature.Sample{Name: "latency_unwatched_seconds_total", Value: r.Unwatched})
	return s
}
