package blockio

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/policy"
)

// measured is the state of the measurement.
type measured struct {
	meter    *monitor.Meter          // nil while there are no reservations and no report is being taken
	lookers  int                     // reports being taken
	watching bool                    // measure details, because a reservation is missed
	timeless bool                    // a disk records no times of requests, so only details measure them
	ids      map[container.ID]uint64 // of cgroups with the io controller
	last     reading                 // totals
	shown    reading                 // between the last two
	window   decide.Window           // made of shown
	failed   string                  // why the measurement fails, as last logged
}

// follow opens, updates or closes the meter, as reservations and reports need. The caller holds f.mu.
func (f *BlockIO) follow() {
	reserved := slices.ContainsFunc(slices.Collect(maps.Values(f.managed)), func(m *managed) bool { return len(m.reserved) > 0 })
	if !reserved && f.lookers == 0 {
		if f.meter != nil {
			if err := f.meter.Close(); err != nil {
				f.cfg.Log.Error("block I/O is still measured", "err", err)
			}
		}
		f.meter, f.last, f.window, f.shown, f.watching = nil, reading{}, decide.Window{}, reading{}, false
		return
	}
	var err error
	if groups := f.groups(); f.meter == nil {
		f.meter, err = monitor.Open(groups)
	} else {
		err = f.meter.Follow(groups)
	}
	if f.meter != nil {
		err = errors.Join(err, f.detail())
	}
	f.tell(err)
}

// detail starts or stops measuring details, as needed. The caller holds f.mu, and there is a meter.
func (f *BlockIO) detail() error {
	return f.meter.Detail(f.lookers > 0 || f.watching || f.timeless)
}

// tell logs each reason for a failed measurement once.
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

// groups returns the running containers. I/O of a removed cgroup is not counted.
func (f *BlockIO) groups() (groups []monitor.Group) {
	ids := make(map[container.ID]uint64)
	for _, c := range f.cfg.Containers.Running() {
		id := f.ids[c.ID]
		if id == 0 && c.Cgroup.IO != "" {
			id, _ = cgroup.ID(c.Cgroup.IO)
		}
		ids[c.ID] = id
		m := f.managed[c.ID]
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

// reading holds counts of the meter and of kernel files, up to one moment or between two.
type reading struct {
	monitor.Reading
	delays map[container.ID]delays // of watched containers
	stolen time.Duration           // CPU time that the hypervisor took, summed over the CPUs
}

// delays is the time that a container was held up. Values that cannot be read are 0.
type delays struct {
	used      time.Duration            // of CPU
	throttled map[string]time.Duration // by quotas, summed over CPUs, for its cgroup and each parent
	cpu, io   time.Duration            // some of its tasks waited (PSI)
	stalls    bool                     // the kernel counts cpu
}

// quota returns the cgroup that throttled it the most, or "" if none did.
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
		if m := f.managed[c.ID]; f.lookers == 0 && (m == nil || len(m.reserved) == 0) {
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
		var err error
		d.cpu, err = cgroup.Stalled(c.Cgroup.V2, "cpu")
		d.stalls = err == nil
		d.io, _ = cgroup.Stalled(c.Cgroup.V2, "io")
		r.delays[c.ID] = d
	}
	r.stolen, _ = irq.Stolen(f.cfg.Roots.Proc)
	return r, nil
}

// measure makes a window of the time since the last reading. The caller holds f.mu.
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
	d := since(r, f.last)
	w := f.windowOf(d)
	if f.control.Lacks(w) {
		if d, r, err = f.glance(); err != nil {
			f.tell(err)
			return
		}
		w = f.windowOf(d)
	}
	if !f.window.Taken.IsZero() {
		f.learn(d.Accounts, w.Length)
	}
	f.timeless = f.timeless || d.Detailed == 0 && d.Lost.Requests > 0
	if f.last, f.window = r, w; w.Detailed {
		f.shown = d
	} else {
		f.shown = d.detailedAs(f.shown)
	}
	f.window.Network = f.networkTime()
}

// glanceFor is how long details are measured when a window lacks them. Decide takes that much longer
// then.
const glanceFor = 250 * time.Millisecond

// glance lengthens the window by a short time with details. The caller holds f.mu, which glance
// releases while it waits.
func (f *BlockIO) glance() (d, r reading, err error) {
	f.watching = true
	f.follow()
	f.mu.Unlock()
	time.Sleep(glanceFor)
	f.mu.Lock()
	if f.meter == nil {
		return d, r, errors.New("nothing is reserved any more")
	}
	r, err = f.read()
	return since(r, f.last), r, err
}

// since returns the difference of two readings, or nothing if there was no earlier one.
func since(now, before reading) reading {
	d := reading{Reading: monitor.Reading{Taken: now.Taken, Lost: now.Lost}, delays: make(map[container.ID]delays)}
	if before.Taken.IsZero() {
		return d // the duration is unknown
	}
	for id, n := range now.delays {
		if b, had := before.delays[id]; had {
			throttled := make(map[string]time.Duration)
			for dir, t := range n.throttled {
				if was, had := b.throttled[dir]; had && t > was {
					throttled[dir] = t - was
				}
			}
			d.delays[id] = delays{max(n.used-b.used, 0), throttled, max(n.cpu-b.cpu, 0), max(n.io-b.io, 0), n.stalls}
		}
	}
	d.stolen = max(now.stolen-before.stolen, 0)
	d.Detailed = max(now.Detailed-before.Detailed, 0)
	was := keyed(before.Accounts, placeOf)
	for _, a := range now.Accounts {
		if b, had := was[placeOf(a)]; had && b.Reads <= a.Reads && b.Writes <= a.Writes {
			a.Reads, a.Writes, a.ReadBytes, a.WriteBytes = a.Reads-b.Reads, a.Writes-b.Writes, a.ReadBytes-b.ReadBytes, a.WriteBytes-b.WriteBytes
			a.Errors -= min(b.Errors, a.Errors)
			a.Under -= min(b.Under, a.Under)
			a.Queue, a.Device = a.Queue.Since(b.Queue), a.Device.Since(b.Device)
		}
		d.Accounts = append(d.Accounts, a)
	}
	type pair struct{ victim, culprit container.ID }
	waited := keyed(before.Waits, func(w monitor.Wait) pair { return pair{w.Victim, w.Culprit} })
	for _, w := range now.Waits {
		if b := waited[pair{w.Victim, w.Culprit}]; b.For <= w.For {
			w.For, w.IO, w.Times = w.For-b.For, w.IO-min(b.IO, w.IO), w.Times-min(b.Times, w.Times)
		}
		d.Waits = append(d.Waits, w)
	}
	switched := keyed(before.Switches, func(s monitor.Switches) container.ID { return s.Container })
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

// keyed returns the elements of a list by their keys.
func keyed[K comparable, V any](list []V, key func(V) K) map[K]V {
	out := make(map[K]V, len(list))
	for _, v := range list {
		out[key(v)] = v
	}
	return out
}

func placeOf(a monitor.Account) decide.Place {
	return decide.Place{Container: a.Container, Disk: a.Disk}
}

// detailedAs returns a reading with the details of an earlier one.
func (d reading) detailedAs(last reading) reading {
	d.Detailed, d.Waits, d.Switches = last.Detailed, last.Waits, last.Switches
	was := keyed(last.Accounts, placeOf)
	for i, a := range d.Accounts {
		if b, had := was[placeOf(a)]; had {
			d.Accounts[i].Queue, d.Accounts[i].Device = b.Queue, b.Device
		}
	}
	return d
}

// windowOf makes a window of the difference of two readings.
func (f *BlockIO) windowOf(d reading) decide.Window {
	w := decide.Window{Taken: d.Taken, CPUs: runtime.NumCPU(), Stolen: d.stolen, Neighbours: make(map[container.ID]decide.Neighbour), Capacity: make(map[decide.Disk]decide.Capacity), Divides: make(map[decide.Disk]string)}
	if !f.window.Taken.IsZero() {
		w.Length = d.Taken.Sub(f.window.Taken)
	}
	const enough = 8 // a window is detailed if details cover at least 1/enough of it
	w.Detailed = d.Detailed > 0 && d.Detailed >= w.Length/enough
	accounts := keyed(d.Accounts, placeOf)
	for _, c := range f.cfg.Containers.Running() {
		n := decide.Neighbour{Name: c.Name, IO: make(map[decide.Disk]api.BlockIOFigures)}
		if m := f.managed[c.ID]; m != nil {
			n.Reserved = len(m.reserved) > 0
			n.Yield = yields(m.target)
		}
		w.Neighbours[c.ID] = n
	}
	for at, a := range accounts {
		if n, known := w.Neighbours[at.Container]; known {
			n.IO[at.Disk] = achieved(a, w.Length)
		}
	}
	for id, m := range f.managed {
		for _, r := range m.reserved {
			if f.lost(r) {
				continue // nothing can meet it
			}
			w.Capacity[r.at()] = f.capacity(r.disk).OrAssumed(f.reservedOf(r.at()))
			if d, err := block.Find(f.cfg.Roots.Sys, r.disk.Major, r.disk.Minor); err == nil { // its scheduler may have changed
				w.Divides[r.at()] = f.divides(d)
			}
			a, delayed := accounts[decide.Place{Container: id, Disk: r.at()}], d.delays[id]
			demand := decide.Demand{
				Container: id, Name: m.target.Container.Name, Disk: r.at(), Reserved: r.figures, Achieved: achieved(a, w.Length), Under: a.Under, Ended: a.Last,
				Waited: make(map[container.ID]time.Duration), Quota: delayed.quota(), Pressure: delayed.cpu, Stalls: delayed.stalls, Used: delayed.used, Interrupts: m.interrupts(), May: f.mayHelp(m),
			}
			for _, wait := range d.Waits {
				if wait.Victim == id && w.Detailed { // scaled up to the whole window
					demand.Waited[wait.Culprit] = time.Duration(float64(wait.IO) * w.Length.Seconds() / d.Detailed.Seconds())
				}
			}
			w.Demands = append(w.Demands, demand)
		}
	}
	slices.SortFunc(w.Demands, func(a, b decide.Demand) int { return int(int64(a.Container) - int64(b.Container)) })
	return w
}

// yields returns what policy allows. The agent only decides where policy says auto.
func yields(t policy.Target) policy.Yield {
	if origin(t, yieldKey).Instead != "" {
		return policy.YieldAuto
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

// look measures all containers for some time, and returns the difference.
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

// Maps implements feature.Mapped.
func (f *BlockIO) Maps() []bpf.Usage {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.meter == nil {
		return nil
	}
	return f.meter.Maps()
}
