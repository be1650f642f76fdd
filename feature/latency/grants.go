package latency

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// latencyKey is the policy key that a grant decides.
const latencyKey = "fairlead.latency"

// grantTime is how long a container is measured after a process has asked for it. A process renews
// its grant by asking again; that of a killed process expires.
const grantTime = 15 * time.Second

// inForce limits how long a request waits until the container is measured.
const inForce = 10 * time.Second

// grantee is a process that asked to measure a container.
type grantee struct {
	container container.ID
	pid       int
}

// grant measures a container for a grantee, whatever policy says.
type grant struct {
	uid          int
	since, until time.Time
}

var _ feature.Commander = (*Latency)(nil)

// Command implements feature.Commander. It records packets and returns them, begins or ends the
// measurement for a process, and begins or ends recording at a container's own request.
func (f *Latency) Command(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if of != nil {
		switch in := ask.Body.(type) {
		case api.LatencyFilter:
			return f.recorded(ctx, of.ID, ask.Self, in, ask.Over)
		case api.LatencyMeasure:
			return f.measureFor(ctx, of.ID, in)
		case api.LatencyTracing:
			return f.switchTracing(of.ID, in.On)
		}
	}
	return nil, fmt.Errorf("latency: no command %T", ask.Body)
}

// measureFor grants a process the measurement of a container, renews or ends the grant, and waits
// until the container is measured.
func (f *Latency) measureFor(ctx context.Context, id container.ID, ask api.LatencyMeasure) (out api.LatencyMeasured, err error) {
	by, now := grantee{id, ask.PID}, time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	g, had := f.grants[by]
	if !ask.On {
		if had {
			g.until = now
			f.grants[by] = g // Decide takes it back
		}
		return out, nil
	}
	if f.host == nil {
		return out, &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "latency: " + f.support.Why}
	}
	if !had {
		g = grant{uid: ask.UID, since: now}
	}
	g.until = now.Add(grantTime)
	f.grants[by] = g
	// A measurement that an earlier grant left is about to end, unless a decision has kept it.
	if err = f.await(ctx, func() bool { return f.asked[id] && f.of(id) != nil }); err != nil {
		g.until = time.Now()
		f.grants[by] = g
		return out, err
	}
	return api.LatencyMeasured{On: true, Until: g.until}, nil
}

// await waits until what Decide and Apply have done meets a condition. f.mu is held, but not while
// it waits.
func (f *Latency) await(ctx context.Context, met func() bool) error {
	for timeout := time.After(inForce); !met(); {
		news := f.news
		f.mu.Unlock()
		var err error
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-timeout:
			err = &api.Error{Status: http.StatusServiceUnavailable, Code: "unavailable", Text: "the container is not measured yet; `fairlead ps` says why"}
		case <-news:
		}
		f.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

// wake wakes requests that await. f.mu is held.
func (f *Latency) wake() {
	close(f.news)
	f.news = make(chan struct{})
}

// Adopt implements feature.Decider. Processes with a grant of an earlier agent ask again.
func (f *Latency) Adopt([]journal.Entry) []policy.Decision { return nil }

// Decide implements feature.Decider: it decides on for containers with a grant that policy does not
// measure anyway.
func (f *Latency) Decide(targets []policy.Target, _ bool) (out []policy.Decision, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.wake()
	clear(f.asked)
	now := time.Now()
	stands := make(map[container.ID]policy.Decision)
	for by, g := range f.grants {
		d := policy.Decision{Container: by.container, Key: latencyKey, Value: "on", Since: g.since, Expiry: g.until}
		d.Reason = fmt.Sprintf("process %d of uid %d has it measured while it runs", by.pid, g.uid)
		if d.Lapsed(now) {
			delete(f.grants, by)
			d.Since = now // a decision other than the current one, which withdraws that
		}
		if other, known := stands[by.container]; !known || d.Expiry.After(other.Expiry) {
			stands[by.container] = d
		}
	}
	for _, t := range targets {
		d, asked := stands[t.Container.ID]
		says := t.Settings.Latency != nil && *t.Settings.Latency
		f.asked[t.Container.ID] = says || asked && !d.Lapsed(now)
		if asked && !says {
			out = append(out, d)
		}
	}
	return out, nil
}
