package blockio

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
)

// eventLog keeps the latest events, with their ids. It is safe for concurrent use.
type eventLog struct {
	mu    sync.Mutex
	all   []api.BlockIOEvent
	last  uint64        // id of the latest event
	added chan struct{} // closed by the next add
}

// maxEvents limits how many events are kept.
const maxEvents = 256

func newEventLog() *eventLog { return &eventLog{added: make(chan struct{})} }

// add gives events their ids, and wakes those who wait for them.
func (l *eventLog) add(events []api.BlockIOEvent) {
	if len(events) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range events {
		l.last++
		e.ID = l.last
		l.all = append(l.all, e)
	}
	l.all = l.all[max(len(l.all)-maxEvents, 0):]
	close(l.added)
	l.added = make(chan struct{})
}

// kept returns the events that are kept.
func (l *eventLog) kept() []api.BlockIOEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

// wait waits for events with a larger id. It takes an id that it has not reached for one of
// an earlier agent, and returns all events.
func (l *eventLog) wait(ctx context.Context, id uint64) ([]api.BlockIOEvent, error) {
	for {
		l.mu.Lock()
		if id > l.last {
			id = 0
		}
		out := slices.DeleteFunc(slices.Clone(l.all), func(e api.BlockIOEvent) bool { return e.ID <= id })
		added := l.added
		l.mu.Unlock()
		if len(out) > 0 {
			return out, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-added:
		}
	}
}

// maxEvidence limits the events that are evidence: earlier ones are about what is over.
const maxEvidence = 8

// Evidence implements feature.Witness: the latest events in which a container is the victim
// or the culprit.
func (f *BlockIO) Evidence(id container.ID) (out []api.Evidence) {
	for _, e := range f.named(f.events.kept()) {
		switch {
		case e.Victim == api.ID(id) && e.What != "release":
			who := ""
			if e.Culprit != 0 {
				who = fmt.Sprintf(" (%s)", cmp.Or(f.name(container.ID(e.Culprit)), e.Culprit.String()))
			}
			out = append(out, api.Evidence{Feature: name, Time: e.Time, Text: fmt.Sprintf("%s at %s%s: %s", e.What, e.Disk, who, e.Text)})
		case e.Culprit == api.ID(id) && id != 0:
			out = append(out, api.Evidence{Feature: name, Time: e.Time, Text: fmt.Sprintf("%s for %s: %s", e.What, cmp.Or(e.Name, "others"), e.Text)})
		}
	}
	return out[max(len(out)-maxEvidence, 0):]
}

// named replaces the number of each event's disk by its name.
func (f *BlockIO) named(events []api.BlockIOEvent) []api.BlockIOEvent {
	for i, e := range events {
		var d decide.Disk
		if _, err := fmt.Sscanf(e.Disk, "%d:%d", &d.Major, &d.Minor); err != nil || d == (decide.Disk{}) {
			events[i].Disk = ""
			continue
		}
		events[i].Disk = f.diskName(d)
	}
	return events
}
