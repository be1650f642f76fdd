package latency

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Reading is what was counted of all tenants, since each was first measured.
type Reading struct {
	Taken   time.Time
	Tenants []Tenant // by container
	// Passed is how many times a packet without a stamp was passed over at a device of
	// interest, beyond the budget; Evicted is how many stamps were lost before
	// it was known whose packets they were of.
	Passed, Evicted uint64
	Lost, LostWaits uint64 // records, and waits of recorded packets, for which there was no room
	// Unwatched is for how long no packet was looked at, as there was a flood.
	Unwatched time.Duration
	Uplinks   int // devices of this host by which packets leave and enter it
}

// Tenant is what was counted of one network tenant.
type Tenant struct {
	Container container.ID // the one with the lowest id
	Members   []container.ID

	key     identity.Tenant
	tallies *tallies
}

// Coverage says what became of the packets of one direction and protocol.
type Coverage struct {
	Seen       uint64 // began at the container's device, or arrived there
	Matched    uint64 // measured between the container's device and the uplink
	Local      uint64 // between containers of this host, or from the host itself
	Unsampled  uint64 // arrived without a stamp while packets were passed over
	Unmatched  uint64 // dropped, for the host itself, or not followed
	Mismatched uint64 // the stamp was another packet's
	Evicted    uint64 // the stamp was lost to a newer packet
}

// Waiting is how many are under way, or have ended without anybody having seen it
// yet.
func (c Coverage) Waiting() uint64 {
	ended := c.Matched + c.Local + c.Unsampled + c.Unmatched + c.Mismatched + c.Evicted
	if ended > c.Seen {
		return 0 // counters are read one after the other
	}
	return c.Seen - ended
}

// Of gives the coverage of one direction and some protocols.
func (t Tenant) Of(d Direction, of ...Protocol) (c Coverage) {
	for _, p := range of {
		x := &t.tallies[d][p]
		c.Seen += x.Seen
		c.Matched += x.Matched
		c.Local += x.Local
		c.Unsampled += x.Unsampled
		c.Unmatched += x.Unmatched
		c.Mismatched += x.Mismatched
		c.Evicted += x.Evicted
	}
	return c
}

// Histogram gives how long packets of some protocols took in a stage.
func (t Tenant) Histogram(d Direction, s Stage, of ...Protocol) *hist.Histogram {
	sum := hist.New(subBits, topBits)
	for _, p := range of {
		sum.Add(t.tallies[d][p].histogram(s))
	}
	return sum
}

// every lists all protocols.
func every() []Protocol { return []Protocol{TCP, UDP, ICMP, Other} }

// Read reads what was counted. It may be called at any time.
func (f *Latency) Read() (Reading, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := Reading{Taken: time.Now()}
	if f.meter == nil {
		return r, nil
	}
	for _, t := range f.tenants {
		all, err := f.meter.read(t.slot)
		if err != nil {
			return r, err
		}
		r.Tenants = append(r.Tenants, Tenant{Container: t.first(), Members: slices.Sorted(maps.Keys(t.members)), key: t.key, tallies: all})
	}
	slices.SortFunc(r.Tenants, func(a, b Tenant) int { return cmp.Compare(a.Container, b.Container) })
	for _, index := range f.meter.ends.uplinks {
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
	r.Unwatched = f.meter.unwatched()
	r.Lost, r.LostWaits, err = f.lost()
	return r, err
}

// Since gives what was counted after an earlier Reading.
func (r Reading) Since(before Reading) Reading {
	was := make(map[identity.Tenant]Tenant) // the container that stands for one may have ended
	for _, t := range before.Tenants {
		was[t.key] = t
	}
	r.Tenants = slices.Clone(r.Tenants)
	for i, t := range r.Tenants {
		if b, known := was[t.key]; known {
			r.Tenants[i].tallies = t.tallies.since(b.tallies)
		}
	}
	if r.Passed >= before.Passed { // else all has begun anew
		r.Passed, r.Evicted, r.Lost = r.Passed-before.Passed, r.Evicted-before.Evicted, r.Lost-before.Lost
		r.LostWaits -= before.LostWaits
		r.Unwatched -= before.Unwatched
	}
	return r
}

// since subtracts; where anything counted down, the tenant is a new one.
func (t *tallies) since(before *tallies) *tallies {
	out := new(tallies)
	*out = *t
	for d := range directions {
		for p := range protocols {
			now, was := &out[d][p], &before[d][p]
			if now.Seen < was.Seen {
				return t
			}
			for _, c := range []struct{ now, was *uint64 }{
				{&now.Seen, &was.Seen}, {&now.Matched, &was.Matched}, {&now.Local, &was.Local}, {&now.Unsampled, &was.Unsampled},
				{&now.Unmatched, &was.Unmatched}, {&now.Mismatched, &was.Mismatched}, {&now.Evicted, &was.Evicted},
			} {
				*c.now -= *c.was
			}
			for s := range stages {
				now.Stage[s].Sum -= was.Stage[s].Sum
				for i := range now.Stage[s].Count {
					now.Stage[s].Count[i] -= was.Stage[s].Count[i]
				}
			}
		}
	}
	return out
}

// The bounds of latency_seconds are 2^firstBound ns (1 us) and each doubling up to
// 2^lastBound ns (1.1 s).
const (
	firstBound = 10
	lastBound  = 30
)

// help says what the samples are.
var help = map[string]string{
	"latency_seconds":                 "Time that packets of the container took on this host, by stage; added and stack are sums of stages.",
	"latency_packets_total":           "Packets of the container that were looked at, by what became of the measurement.",
	"latency_passed_events_total":     "Times a packet was passed over on this host because a CPU had more than it measures.",
	"latency_evicted_packets_total":   "Packets on this host whose stamp was lost before it was known whose they were.",
	"latency_unwatched_seconds_total": "Time in which no packet on this host was looked at, because there was a flood.",
	"latency_lost_records_total":      "Records of single packets for which the buffer had no room, or that were too many.",
	"latency_lost_waits_total":        "Waits of recorded packets that were overwritten, or for which the buffer had no room.",
}

// Snapshot implements feature.Feature: what became of the packets.
func (f *Latency) Snapshot() feature.Snapshot {
	return f.snapshot(func(s *feature.Snapshot, t Tenant, d Direction) {
		c := t.Of(d, every()...)
		for _, r := range []struct {
			result string
			n      uint64
		}{
			{"matched", c.Matched}, {"local", c.Local}, {"unsampled", c.Unsampled}, {"unmatched", c.Unmatched},
			{"mismatched", c.Mismatched}, {"evicted", c.Evicted},
		} {
			s.Samples = append(s.Samples, feature.Sample{
				Container: t.Container, Name: "latency_packets_total", Value: float64(r.n),
				Labels: []feature.Label{{Name: "direction", Value: d.String()}, {Name: "result", Value: r.result}},
			})
		}
	}, func(s *feature.Snapshot, r Reading) {
		for _, host := range []struct {
			name  string
			value float64
		}{
			{"latency_passed_events_total", float64(r.Passed)}, {"latency_evicted_packets_total", float64(r.Evicted)},
			{"latency_lost_records_total", float64(r.Lost)}, {"latency_lost_waits_total", float64(r.LostWaits)}, {"latency_unwatched_seconds_total", r.Unwatched.Seconds()},
		} {
			s.Samples = append(s.Samples, feature.Sample{Name: host.name, Value: host.value})
		}
	})
}

// Export implements feature.Exporter: the histograms, of all protocols together.
func (f *Latency) Export() feature.Snapshot {
	return f.snapshot(func(s *feature.Snapshot, t Tenant, d Direction) {
		for st := range stages {
			h := t.Histogram(d, st, every()...)
			if h.Count() == 0 {
				continue
			}
			s.Samples = append(s.Samples, feature.Sample{
				Container: t.Container, Name: "latency_seconds", Histogram: h.Forms(firstBound, lastBound),
				Labels: []feature.Label{{Name: "direction", Value: d.String()}, {Name: "stage", Value: st.Name(d)}},
			})
		}
	}, nil)
}

// snapshot makes samples of each tenant and direction, and of the host if host is
// not nil; none if nobody is measured.
func (f *Latency) snapshot(add func(*feature.Snapshot, Tenant, Direction), host func(*feature.Snapshot, Reading)) feature.Snapshot {
	r, err := f.Read()
	s := feature.Snapshot{Taken: r.Taken, Help: help}
	if err != nil {
		f.cfg.Log.Warn("read latency", "err", err)
		return s
	}
	for _, t := range r.Tenants {
		for d := range directions {
			add(&s, t, d)
		}
	}
	if host != nil && len(r.Tenants) > 0 {
		host(&s, r)
	}
	return s
}
