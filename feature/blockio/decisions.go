package blockio

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// The keys that the agent decides.
const (
	yieldKey  = "fairlead.io.yield"
	weightKey = "fairlead.io.weight"
	maxKey    = "fairlead.io.max"
)

// judged holds the decisions and their reasons.
type judged struct {
	control   decide.Control
	standings map[decide.Place]decide.Standing // after the last window
	actions   map[container.ID]decide.Action   // in force now
	limits    decide.Limits
	decided   map[decided]bool // decisions to take back
}

// Adopt implements feature.Decider. A container that yields a CPU continues to yield. Weights and caps
// are decided anew if they are needed.
func (f *BlockIO) Adopt(left []journal.Entry) []policy.Decision {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := make(map[container.ID]policy.Decision)
	for _, e := range left {
		id := container.ID(e.Owner.Container)
		d, seen := was[id]
		if !seen {
			d = policy.Decision{Container: id, Key: yieldKey, Instead: string(policy.YieldAuto), Reason: "an earlier agent decided so", Since: e.When, Expiry: e.Expiry}
		}
		switch name := filepath.Base(e.Ref.Object); {
		case e.Ref.Kind != cgroup.KindFile, strings.HasPrefix(name, "blkio."): // a weight at disks, say
			continue
		case e.Value == cgroup.Idled:
			if d.Value == "" {
				d.Value = string(policy.YieldIdle)
			}
		case strings.Contains(name, "quota"), name == "cpu.max":
			d.Value = string(policy.YieldQuota)
		default:
			continue
		}
		was[id] = d
	}
	out := f.adoptHelp(left)
	for _, id := range slices.Sorted(maps.Keys(was)) {
		d := was[id]
		f.control.Adopt(id, policy.Yield(d.Value), d.Reason, d.Since, time.Now())
		out = append(out, d)
	}
	f.actions = f.control.Actions()
	return out
}

// Decide implements feature.Decider: it measures, judges, and decides which containers yield.
func (f *BlockIO) Decide(targets []policy.Target, complete bool) (out []policy.Decision, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.promote() // new threads
	err = f.shorten()
	f.measure()
	w := f.window
	if f.meter == nil {
		// Nothing is reserved, so nothing needs to be done.
		w = decide.Window{Taken: time.Now(), Length: time.Second, Neighbours: f.windowOf(reading{}).Neighbours}
	}
	w.Complete = complete
	judged := f.meter != nil || complete // else a reservation may exist that the agent does not know yet
	if judged {
		f.control.Next(w)
		f.standings, f.actions = f.control.Standings(), f.control.Actions()
		f.events.add(f.control.TakeEvents())
		f.limits.Note(w, f.standings, didAt(f.shown.Accounts, w.Length))
		if f.watching = f.meter != nil && f.control.Watches(w.Taken); f.meter != nil {
			err = errors.Join(err, f.detail())
		}
	}
	f.tellChanged(w.Taken, judged)
	for _, t := range targets {
		id := t.Container.ID
		a := f.actions[id]
		d := policy.Decision{Container: id, Reason: a.Reason, Since: a.Since}
		if t.Settings.IOYield == policy.YieldAuto {
			d.Key, d.Instead, d.Value = yieldKey, string(policy.YieldAuto), string(cmp.Or(a.Yield, policy.YieldOff))
			out = append(out, d)
		}
		if t.Settings.Interrupts == policy.InterruptsAuto {
			d.Key, d.Instead, d.Value = interruptsKey, string(policy.InterruptsAuto), string(policy.InterruptsOff)
			if a.Apart {
				d.Value = string(policy.InterruptsApart)
			}
			out = append(out, d)
		}
		weight := ""
		if a.Weight != 0 {
			weight = strconv.Itoa(int(a.Weight))
		}
		for key, value := range map[string]string{maxKey: f.caps(t, a), weightKey: weight, helpKey: string(a.Help)} {
			d := policy.Decision{Container: id, Key: key, Value: value, Reason: a.Reason, Since: a.Since}
			at := decided{id, key}
			if value != "" {
				f.decided[at] = true
				out = append(out, d)
			} else if f.decided[at] {
				delete(f.decided, at)
				d.Expiry = time.Unix(1, 0) // an expired decision takes back the earlier one
				out = append(out, d)
			}
		}
	}
	return out, err
}

// decided identifies a decision that policy cannot undo with a value of its own.
type decided struct {
	container container.ID
	key       string
}

// divides returns the name of the mechanism that divides a disk by cgroup weights, or "".
func (f *BlockIO) divides(d block.Disk) string {
	switch {
	case d.Scheduler == "bfq":
		return "BFQ"
	case f.layout.IO == f.layout.V2 && cgroup.CostEnabled(f.layout.V2, d.Number()):
		return "iocost"
	}
	return ""
}

// caps returns the value of io.max that combines the caps of policy with those of an Action; "" if the
// Action has none.
func (f *BlockIO) caps(t policy.Target, a decide.Action) string {
	if len(a.Caps) == 0 {
		return ""
	}
	ios := slices.Clone(t.Settings.IO)
	for _, at := range slices.SortedFunc(maps.Keys(a.Caps), func(x, y decide.Disk) int { return strings.Compare(x.String(), y.String()) }) {
		c := a.Caps[at]
		disk, err := block.Find(f.cfg.Roots.Sys, at.Major, at.Minor)
		if err != nil {
			continue // it has vanished
		}
		// Policy may use another name of the disk.
		i := slices.IndexFunc(ios, func(io policy.IO) bool {
			d, err := block.Open(f.cfg.Roots.Sys, io.Device)
			return err == nil && d.Number() == disk.Number()
		})
		if i < 0 {
			i = len(ios)
			ios = append(ios, policy.IO{Device: "/dev/" + disk.Name})
		}
		most := &ios[i].Max
		most.ReadIOPS, most.WriteIOPS = lower(most.ReadIOPS, c.ReadIOPS), lower(most.WriteIOPS, c.WriteIOPS)
		most.ReadBytes, most.WriteBytes = lower(most.ReadBytes, c.ReadBytes), lower(most.WriteBytes, c.WriteBytes)
	}
	return policy.FormatMax(ios)
}

// lower returns the lower of two caps. A cap of 0 is none.
func lower(a, b uint64) uint64 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// diskName returns the name of a disk, or its number if the disk has vanished.
func (f *BlockIO) diskName(d decide.Disk) string {
	if disk, err := block.Find(f.cfg.Roots.Sys, d.Major, d.Minor); err == nil {
		return disk.Name
	}
	return d.String()
}

// actionText describes the measures that are applied to a container.
func (f *BlockIO) actionText(id container.ID, a decide.Action) string {
	var parts []string
	if a.Help != "" {
		parts = append(parts, helpText(a, f.managed[id]))
	}
	switch a.Yield {
	case policy.YieldIdle:
		parts = append(parts, "runs on idle CPUs only")
	case policy.YieldQuota:
		parts = append(parts, fmt.Sprintf("runs on idle CPUs only, 1/%d of one at the most", quotaPart))
	}
	if a.Weight != 0 {
		parts = append(parts, fmt.Sprintf("weight %d at disks", a.Weight))
	}
	if a.Apart {
		parts = append(parts, "the network's interrupts are kept off its disks' CPUs")
	}
	for d, c := range a.Caps {
		parts = append(parts, f.diskName(d)+": "+decide.CapText(c))
	}
	slices.Sort(parts)
	return strings.Join(parts, "; ")
}

// refused returns an error that is the caller's fault.
func refused(status int, code, format string, args ...any) error {
	return &api.Error{Status: status, Code: code, Text: fmt.Sprintf(format, args...)}
}

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

// add gives events their ids, and wakes the waiters.
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

// wait waits for events with a larger id. An id beyond the last one is from an earlier agent, so wait
// returns all events then.
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

// maxEvidence limits the events that are evidence: older ones describe situations that are over.
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
