package latency

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Report implements feature.Reporter: what packets took, over the time ask.Over if
// that is not 0; with an api.LatencyFilter in ask.Body the records that it wants; with
// an api.LatencyTracing, records begin or end.
func (f *Latency) Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if of != nil {
		switch body := ask.Body.(type) {
		case api.LatencyFilter:
			return f.reportRecords(ctx, of.ID, ask.Self, body, ask.Over)
		case api.LatencyMeasure:
			return f.measureFor(ctx, of.ID, body)
		case api.LatencyTracing:
			return f.switchTracing(of.ID, body.On)
		}
	}
	r, err := f.Read()
	if err != nil {
		return nil, err
	}
	var since time.Time
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
		r, since, done = r.Since(before), before.Taken, f.packetWork().since(worked)
	}
	if of != nil {
		r.Tenants = networkOf(r, *of)
	}
	out := api.Latency{Since: since, Taken: r.Taken, Passed: r.Passed, Evicted: r.Evicted, Lost: r.Lost, LostWaits: r.LostWaits, Unwatched: r.Unwatched.Seconds()}
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
			c.Meanwhile = done.meanwhile(tenantsOf(r, c.Container)[0].Members, r.Taken.Sub(since), name)
		}
	}
	return out, nil
}

// tenantsOf gives what is of one container, under its own id where others that share
// its network have it too.
func tenantsOf(r Reading, id container.ID) []Tenant {
	for _, t := range r.Tenants {
		if slices.Contains(t.Members, id) {
			t.Container = id
			return []Tenant{t}
		}
	}
	return nil
}

// networkOf is tenantsOf for who looks at a container from outside: if policy has
// only the packets of another one measured that shares its network, it gives the
// tenant under that one's name.
func networkOf(r Reading, c container.Container) []Tenant {
	if own := tenantsOf(r, c.ID); own != nil {
		return own
	}
	key := identity.TenantOf(c)
	return slices.DeleteFunc(slices.Clone(r.Tenants), func(t Tenant) bool { return key == identity.Tenant{} || t.key != key })
}

// wire puts tenants into the API's form.
func wire(r Reading, lookup func(container.ID) (container.Container, bool)) []api.LatencyContainer {
	out := []api.LatencyContainer{}
	for _, t := range r.Tenants {
		c, known := lookup(t.Container)
		for d := range directions {
			row := api.LatencyContainer{
				Container: t.Container, Name: c.Name, Direction: d.String(),
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
	stage := func(s Stage) *api.LatencyStage { return stageOf(s.Name(d), t.Histogram(d, s, of...)) }
	out.Added, out.Stack, out.Local = stage(Added), stage(Stack), stage(Local)
	for _, s := range way(d) {
		if st := stage(s); st != nil {
			out.Stages = append(out.Stages, *st)
		}
	}
	return out
}

// stageOf is nil without packets.
func stageOf(name string, h *hist.Histogram) *api.LatencyStage {
	n := h.Count()
	if n == 0 {
		return nil
	}
	return &api.LatencyStage{
		Stage: name, Packets: n, Mean: h.Seconds() / float64(n),
		P50: h.Quantile(0.5).Seconds(), P90: h.Quantile(0.9).Seconds(), P99: h.Quantile(0.99).Seconds(), Max: h.Quantile(1).Seconds(),
	}
}

// SelfReport implements feature.SelfReporter: a container sees what is its own.
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

func (f *Latency) reportRecords(ctx context.Context, id container.ID, self bool, filter api.LatencyFilter, over time.Duration) (any, error) {
	out := api.LatencyRecords{Records: []api.LatencyRecord{}}
	most := maxRecords
	var owners *owners // of the first wait on
	if filter.Most > 0 {
		most = filter.Most
	}
	for end := time.Now().Add(over); ; {
		got, measured, err := f.Trace(ctx, id, self, filter, most, max(time.Until(end), 0))
		if err != nil {
			return nil, err
		}
		if !measured {
			return nil, notMeasured()
		}
		out.Next, out.Lost, out.LostWaits, out.OwnCost, out.Limited = got.Next, got.Lost, got.LostWaits, wireCosts(got.Costs), got.Limited
		out.Missed += got.Missed
		for _, r := range got.Records {
			if wants(filter, &r) {
				wr := wireRecord(r)
				for _, w := range r.waits {
					if owners == nil {
						owners = f.owners()
					}
					wr.Waits = append(wr.Waits, owners.wire(w, r.Direction, f.membersOf(id)))
				}
				out.Records = append(out.Records, wr)
			}
		}
		if len(out.Records) > 0 || !time.Now().Before(end) {
			return out, nil
		}
		filter.After = got.Next
	}
}

// membersOf lists the containers that share a network with one that is measured.
func (f *Latency) membersOf(id container.ID) []container.ID {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t := f.member[id]; t != nil {
		return slices.Collect(maps.Keys(t.members))
	}
	return []container.ID{id}
}

// wireCosts leaves out hooks at which nothing was timed.
func wireCosts(all [hookXmit + 1]*hist.Histogram) (out api.LatencyCosts) {
	for hook, name := range []string{hookPoll: api.LatencyPoll, hookReceive: api.LatencyReceive, hookQueue: api.LatencyQueue, hookXmit: api.LatencyXmit} {
		if h := all[hook]; h != nil && h.Count() > 0 {
			out = append(out, api.LatencyCost{Hook: name, Stamps: h.Count(), P50: h.Quantile(0.5).Seconds()})
		}
	}
	return out
}

func notMeasured() error {
	return &api.Error{Status: http.StatusConflict, Code: "not_measured",
		Text: "the container's packets are not measured: policy has to say fairlead.latency=on"}
}

// class is how a protocol's number is called.
func class(protocol uint8) Protocol {
	switch protocol {
	case unix.IPPROTO_TCP:
		return TCP
	case unix.IPPROTO_UDP:
		return UDP
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return ICMP
	}
	return Other
}

func wireRecord(r Record) api.LatencyRecord {
	seconds := func(s Stage) *float64 {
		if r.Stages[s] < 0 {
			return nil
		}
		v := r.Stages[s].Seconds()
		return &v
	}
	w := api.LatencyRecord{
		Time: r.At, Direction: r.Direction.String(), Protocol: class(r.Protocol).String(),
		From: r.From.Addr().String(), FromPort: int(r.From.Port()), To: r.To.Addr().String(), ToPort: int(r.To.Port()),
		Seq: uint64(r.Seq), Type: int(r.Type), Syn: r.Syn, Bytes: r.Bytes, Added: seconds(Added), Stack: seconds(Stack), Stages: []api.LatencyPart{},
	}
	if r.Mace >= 0 {
		v := r.Mace.Seconds()
		w.Mace = &v
	}
	for _, s := range way(r.Direction) {
		if v := seconds(s); v != nil {
			w.Stages = append(w.Stages, api.LatencyPart{Stage: s.Name(r.Direction), Seconds: *v})
		}
	}
	return w
}
