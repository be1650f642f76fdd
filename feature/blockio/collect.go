package blockio

import (
	"context"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// follow has the meter measure who is to be measured, or nobody. The caller holds f.mu.
func (f *BlockIO) follow() {
	reserved := slices.ContainsFunc(slices.Collect(maps.Values(f.members)), func(m *member) bool { return len(m.reserved) > 0 })
	if !reserved && f.lookers == 0 && !f.calibrating {
		if f.meter != nil {
			if err := f.meter.Close(); err != nil {
				f.cfg.Log.Error("block I/O is still measured", "err", err)
			}
		}
		f.meter, f.last, f.window, f.shown = nil, reading{}, Window{}, reading{}
		return
	}
	var err error
	if groups := f.groups(); f.meter == nil {
		f.meter, err = monitor.Open(groups)
	} else {
		err = f.meter.Follow(groups)
	}
	f.tell(err)
}

// tell logs why something is not measured, once.
func (f *BlockIO) tell(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != f.failed && text != "" {
		f.cfg.Log.Error("block I/O is not measured, or not of all", "err", err)
	}
	f.failed = text
}

// groups are the containers that run; of one whose cgroup has gone, its I/O is nobody's.
func (f *BlockIO) groups() (groups []monitor.Group) {
	ids := make(map[container.ID]uint64)
	for _, c := range f.cfg.Containers.Running() {
		id := f.ids[c.ID]
		if id == 0 && c.Cgroup.IO != "" {
			id, _ = cgroup.ID(c.Cgroup.IO)
		}
		ids[c.ID] = id
		m := f.members[c.ID]
		g := monitor.Group{Container: c.ID, V2: uint64(c.ID), IO: id}
		if m != nil {
			for _, r := range m.reserved {
				g.Reserved = append(g.Reserved, r.at())
			}
		}
		g.Watched = f.lookers > 0 || len(g.Reserved) > 0
		groups = append(groups, g)
	}
	f.ids = ids
	return groups
}

// reading is what the meter and the kernel's own files count, up to a moment or in a time.
type reading struct {
	monitor.Reading
	delays map[container.ID]delays // of those that are watched
	stolen time.Duration           // the hypervisor let the CPUs wait, added up
}

// delays are for how long a container could not go on. What cannot be read is 0.
type delays struct {
	used      time.Duration            // of CPU
	throttled map[string]time.Duration // quotas kept it from running, added up over CPUs, by cgroup: its own and those above
	cpu, io   time.Duration            // some of its tasks waited, by the kernel's pressure stall information
}

// quota is the cgroup whose quota throttled it the most; "" if none did.
func (d delays) quota() (most string) {
	for _, dir := range slices.Sorted(maps.Keys(d.throttled)) {
		if d.throttled[dir] > d.throttled[most] {
			most = dir
		}
	}
	return most
}

// read takes a reading. The caller holds f.mu, and there is a meter.
func (f *BlockIO) read() (r reading, err error) {
	if r.Reading, err = f.meter.Read(); err != nil {
		return reading{}, err
	}
	r.delays = make(map[container.ID]delays)
	quotas := make(map[string]time.Duration)
	for _, c := range f.cfg.Containers.Running() {
		if m := f.members[c.ID]; f.lookers == 0 && (m == nil || len(m.reserved) == 0) {
			continue
		}
		d := delays{throttled: make(map[string]time.Duration)}
		for dir := c.Cgroup.CPU; len(dir) > len(f.layout.CPU); dir = filepath.Dir(dir) {
			t, known := quotas[dir]
			if !known {
				t, _, _ = cgroup.Throttled(dir)
				quotas[dir] = t
			}
			d.throttled[dir] = t
		}
		d.used, _ = cgroup.Usage(c.Cgroup.V2)
		d.cpu, _ = cgroup.Stalled(c.Cgroup.V2, "cpu")
		d.io, _ = cgroup.Stalled(c.Cgroup.V2, "io")
		r.delays[c.ID] = d
	}
	r.stolen, _ = sched.Stolen(f.cfg.Roots.Proc)
	return r, nil
}

// measure makes a window of what happened between the last reading and now. The caller holds f.mu.
func (f *BlockIO) measure() {
	f.follow()
	if f.meter == nil {
		return
	}
	r, err := f.read()
	if err != nil {
		f.tell(err)
		return
	}
	f.shown, f.last = since(r, f.last), r
	if !f.window.Taken.IsZero() {
		f.learn(f.shown.Accounts, r.Taken.Sub(f.window.Taken))
	}
	f.window = f.windowOf(f.shown)
	f.window.Network = f.networkTime()
}

// since returns what happened between two readings, which is nothing if there was none before.
func since(now, before reading) reading {
	d := reading{Reading: monitor.Reading{Taken: now.Taken, Lost: now.Lost}, delays: make(map[container.ID]delays)}
	if before.Taken.IsZero() {
		return d // nobody knows over what time it was counted
	}
	for id, n := range now.delays {
		if b, had := before.delays[id]; had {
			throttled := make(map[string]time.Duration)
			for dir, t := range n.throttled {
				if was, had := b.throttled[dir]; had && t > was {
					throttled[dir] = t - was
				}
			}
			d.delays[id] = delays{max(n.used-b.used, 0), throttled, max(n.cpu-b.cpu, 0), max(n.io-b.io, 0)}
		}
	}
	d.stolen = max(now.stolen-before.stolen, 0)
	was := make(map[Place]monitor.Account, len(before.Accounts))
	for _, a := range before.Accounts {
		was[Place{a.Container, a.Disk}] = a
	}
	for _, a := range now.Accounts {
		if b, had := was[Place{a.Container, a.Disk}]; had && b.Reads <= a.Reads && b.Writes <= a.Writes {
			a.Reads, a.Writes, a.ReadBytes, a.WriteBytes = a.Reads-b.Reads, a.Writes-b.Writes, a.ReadBytes-b.ReadBytes, a.WriteBytes-b.WriteBytes
			a.Errors -= min(b.Errors, a.Errors)
			a.Queue, a.Device = a.Queue.Since(b.Queue), a.Device.Since(b.Device)
		}
		d.Accounts = append(d.Accounts, a)
	}
	type pair struct{ victim, culprit container.ID }
	waited := make(map[pair]monitor.Wait, len(before.Waits))
	for _, w := range before.Waits {
		waited[pair{w.Victim, w.Culprit}] = w
	}
	for _, w := range now.Waits {
		if b := waited[pair{w.Victim, w.Culprit}]; b.For <= w.For {
			w.For, w.IO, w.Times = w.For-b.For, w.IO-min(b.IO, w.IO), w.Times-min(b.Times, w.Times)
		}
		d.Waits = append(d.Waits, w)
	}
	switched := make(map[container.ID]monitor.Switches, len(before.Switches))
	for _, s := range before.Switches {
		switched[s.Container] = s
	}
	for _, s := range now.Switches {
		if b, had := switched[s.Container]; had && b.Voluntary <= s.Voluntary && b.Involuntary <= s.Involuntary {
			s.Voluntary, s.Involuntary, s.Foreign = s.Voluntary-b.Voluntary, s.Involuntary-b.Involuntary, s.Foreign-min(b.Foreign, s.Foreign)
			s.Wait = s.Wait.Since(b.Wait)
		}
		d.Switches = append(d.Switches, s)
	}
	d.Lost.Accounts -= min(before.Lost.Accounts, d.Lost.Accounts)
	d.Lost.Requests -= min(before.Lost.Requests, d.Lost.Requests)
	d.Lost.Waits -= min(before.Lost.Waits, d.Lost.Waits)
	d.Lost.Pairs -= min(before.Lost.Pairs, d.Lost.Pairs)
	d.Lost.Levels -= min(before.Lost.Levels, d.Lost.Levels)
	return d
}

// windowOf puts a difference of readings into the form that is judged.
func (f *BlockIO) windowOf(d reading) Window {
	w := Window{Taken: d.Taken, CPUs: runtime.NumCPU(), Neighbours: make(map[container.ID]Neighbour), Capacity: make(map[monitor.Disk]Capacity), Divides: make(map[monitor.Disk]string)}
	if !f.window.Taken.IsZero() {
		w.Length = d.Taken.Sub(f.window.Taken)
	}
	done, under, ended := make(map[Place]api.BlockIOFigures), make(map[Place]time.Duration), make(map[Place]time.Duration)
	for _, a := range d.Accounts {
		at := Place{a.Container, a.Disk}
		done[at] = achieved(a, w.Length)
		under[at] = time.Duration(a.Queue.Sum + a.Device.Sum)
		ended[at] = a.Last
	}
	for _, c := range f.cfg.Containers.Running() {
		n := Neighbour{Name: c.Name, IO: make(map[monitor.Disk]api.BlockIOFigures)}
		if m := f.members[c.ID]; m != nil {
			n.Reserved = len(m.reserved) > 0
			n.Yield = yields(m.target)
		}
		w.Neighbours[c.ID] = n
	}
	for at, io := range done {
		if n, known := w.Neighbours[at.Container]; known {
			n.IO[at.Disk] = io
		}
	}
	for id, m := range f.members {
		for _, r := range m.reserved {
			if f.lost(r) {
				continue // there is nothing to be met, and nobody in the way
			}
			w.Capacity[r.at()] = f.working(r.disk)
			if d, err := block.Find(f.cfg.Roots.Sys, r.disk.Major, r.disk.Minor); err == nil { // its scheduler may have been changed
				w.Divides[r.at()] = f.divides(d)
			}
			at := Place{id, r.at()}
			demand := Demand{
				Container: id, Name: m.target.Container.Name, Disk: r.at(), Reserved: r.figures, Achieved: done[at], Under: under[at], Ended: ended[at],
				Waited: make(map[container.ID]time.Duration), Quota: d.delays[id].quota(), Pressure: d.delays[id].cpu, Used: d.delays[id].used, Interrupts: m.interrupts(), May: f.mayHelp(m),
			}
			for _, wait := range d.Waits {
				if wait.Victim == id {
					demand.Waited[wait.Culprit] = wait.IO
				}
			}
			w.Demands = append(w.Demands, demand)
		}
	}
	slices.SortFunc(w.Demands, func(a, b Demand) int { return int(int64(a.Container) - int64(b.Container)) })
	return w
}

// yields returns what policy allows. A decision takes the place of auto only.
func yields(t policy.Target) policy.Yield {
	for _, o := range t.Origins {
		if o.Key == yieldKey && o.Instead != "" {
			return policy.YieldAuto
		}
	}
	return t.Settings.IOYield
}

func achieved(a monitor.Account, length time.Duration) api.BlockIOFigures {
	if length <= 0 {
		return api.BlockIOFigures{}
	}
	rate := func(n uint64) uint64 { return uint64(float64(n)/length.Seconds() + 0.5) }
	return api.BlockIOFigures{ReadIOPS: rate(a.Reads), WriteIOPS: rate(a.Writes), ReadBytes: rate(a.ReadBytes), WriteBytes: rate(a.WriteBytes)}
}

// look watches all containers for a time, and returns what happened in it.
func (f *BlockIO) look(ctx context.Context, over time.Duration) (d reading, length time.Duration, err error) {
	read := func() (reading, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.follow(); f.meter == nil {
			return reading{}, &api.Error{Status: 503, Code: "unavailable", Text: "block I/O cannot be measured: " + f.failed}
		}
		return f.read()
	}
	f.mu.Lock()
	f.lookers++
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.lookers = max(f.lookers-1, 0)
		f.follow()
	}()
	before, err := read()
	if err != nil {
		return d, 0, err
	}
	select {
	case <-ctx.Done():
		return d, 0, ctx.Err()
	case <-time.After(over):
	}
	now, err := read()
	if err != nil {
		return d, 0, err
	}
	return since(now, before), now.Taken.Sub(before.Taken), nil
}

// Bounds of the buckets in Prometheus' form: 2^12 ns is 4 µs, 2^30 a second.
const firstBucket, lastBucket = 12, 30

// Snapshot implements feature.Feature: what was counted since something is measured.
func (f *BlockIO) Snapshot() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now(), Help: help()}
	add := func(id container.ID, sample, disk string, v float64, labels ...feature.Label) {
		s.Samples = append(s.Samples, feature.Sample{Container: id, Name: sample, Device: disk, Labels: labels, Value: v})
	}
	way := func(value string) feature.Label { return feature.Label{Name: "direction", Value: value} }
	for _, a := range f.last.Accounts {
		disk := f.diskName(a.Disk)
		for _, x := range []struct {
			way        string
			ios, bytes uint64
		}{{"read", a.Reads, a.ReadBytes}, {"write", a.Writes, a.WriteBytes}} {
			add(a.Container, "blockio_requests_total", disk, float64(x.ios), way(x.way))
			add(a.Container, "blockio_bytes_total", disk, float64(x.bytes), way(x.way))
		}
		add(a.Container, "blockio_errors_total", disk, float64(a.Errors))
	}
	for _, w := range f.last.Waits {
		if w.Culprit != monitor.System && monitor.Nobody(w.Culprit) {
			continue
		}
		add(w.Victim, "blockio_runqueue_wait_seconds_total", "", w.For.Seconds(), feature.Label{Name: "culprit", Container: w.Culprit})
	}
	for id, m := range f.members {
		for _, r := range m.reserved {
			if c := f.capacity(r.disk); c.Known() {
				all, _, _ := c.Share(r.figures)
				add(id, "blockio_reserved_share", r.disk.Name, all)
			}
			verified := 0.0
			if f.admission(r).How == admissionVerified {
				verified = 1
			}
			add(id, "blockio_reservation_verified", r.disk.Name, verified)
			met := 1.0
			if f.standing(id, r).missed() {
				met = 0
			}
			add(id, "blockio_reservation_met", r.disk.Name, met)
		}
	}
	for id, a := range f.control.Actions() {
		if !a.none() {
			add(id, "blockio_held_back", "", 1)
		}
		if a.Help != "" {
			add(id, "blockio_helped", "", 1, feature.Label{Name: "by", Value: string(a.Help)})
		}
	}
	return s
}

// Export implements feature.Exporter: the latencies of requests.
func (f *BlockIO) Export() feature.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feature.Snapshot{Taken: time.Now(), Help: help()}
	for _, a := range f.last.Accounts {
		for sample, h := range map[string]*hist.Histogram{"blockio_queue_seconds": a.Queue, "blockio_device_seconds": a.Device} {
			s.Samples = append(s.Samples, feature.Sample{Container: a.Container, Name: sample, Device: f.diskName(a.Disk), Histogram: h.Forms(firstBucket, lastBucket)})
		}
	}
	return s
}

func help() map[string]string {
	return map[string]string{
		"blockio_requests_total":              "Requests that a disk has completed, since block I/O is measured.",
		"blockio_bytes_total":                 "Bytes of requests that a disk has completed, since block I/O is measured.",
		"blockio_errors_total":                "Requests that a disk has failed, since block I/O is measured.",
		"blockio_runqueue_wait_seconds_total": "Time for which tasks of a container with a reservation waited for a CPU while those of the culprit ran there.",
		"blockio_reserved_share":              "Part of the disk's capacity that the container has reserved, where that capacity is known.",
		"blockio_reservation_verified":        "Whether the reservation was admitted against a capacity that was measured or given (1), or that is not known (0).",
		"blockio_reservation_met":             "Whether the container gets what it has reserved, or asks for less.",
		"blockio_helped":                      "Whether something is done for the container's own tasks, as its reservation was missed for want of CPU.",
		"blockio_held_back":                   "Whether the container is held back for the sake of a reservation.",
		"blockio_queue_seconds":               "Time of requests from being made to being given to the disk.",
		"blockio_device_seconds":              "Time of requests at the disk.",
	}
}

// Maps implements feature.Mapped.
func (f *BlockIO) Maps() []bpf.Usage {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter == nil {
		return nil
	}
	return f.meter.Maps()
}
