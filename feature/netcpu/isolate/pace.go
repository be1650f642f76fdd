package isolate

import (
	"errors"
	"io/fs"
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/drop"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// The uplinks' threads work for a container before its own thread does, in a cgroup that weighs as
// much as one container. So a flood or bulk TCP takes time from others for which the receiver does not
// pay. While it comes in and the uplinks' CPUs have no idle time, that work counts into the receiver's
// quota, and into the time that its weight allows beside neighbours that go short: the uplinks let
// pass only as many of its packets as it has time left for.

// paceWindow holds the packets of one container in some time, and their cost.
type paceWindow struct {
	length  time.Duration
	alone   uint64        // packets from queues that it owns
	arrived uint64        // packets from other queues of the uplinks,
	passed  uint64        // and the part of these that was not dropped
	own     time.Duration // CPU time of the container's tasks and threads; 0: unknown
	uplinks time.Duration // CPU time of the uplinks' threads for its packets
	due     time.Duration // limit of own and uplinks together; 0: none
	busy    bool          // the uplinks' CPUs had no idle time or, while a neighbour goes short, less than the uplinks worked
	single  uint64        // single packets that reached it
	super   uint64        // super-packets that reached it
	much    bool          // the packets are a flood or bulk
}

// works returns the uplinks' work, in packets that pass. A dropped packet counts law.Dropped.
func (w paceWindow) works() float64 {
	return float64(w.passed) + law.Dropped*float64(w.arrived-w.passed)
}

// faster is the growth of a rate from one window to the next, while CPU time is left.
const faster = 1 + 2*law.Least

// paceControl decides how many packets of one container may pass the uplinks. The zero value lets all
// packets pass.
type paceControl struct{ rate float64 }

// next counts one window and returns the rate from now on, in packets/s; 0: no limit. It limits only
// traffic that is much, or that was already limited.
func (c *paceControl) next(w paceWindow) float64 {
	perSecond := func(n uint64) float64 { return float64(n) / w.length.Seconds() }
	if w.own == 0 || w.length <= 0 || !w.much && c.rate == 0 {
		c.rate = 0
		return c.rate
	}
	fits := math.Inf(1) // part of the packets for which there is time
	if w.due > 0 && w.busy {
		may := max(w.due, w.own+w.due/law.Most)
		fits = float64(may) / float64(w.own+w.uplinks)
	}
	switch {
	case fits < 1:
		c.rate = max(law.Rate, fits*perSecond(w.passed))
	case c.rate > 0:
		if c.rate *= min(fits, faster); c.rate > perSecond(w.arrived) {
			c.rate = 0
		}
	}
	return c.rate
}

// flow is a reading of one tenant's counters.
type flow struct {
	at    time.Time
	own   time.Duration
	alone uint64 // packets from queues that it owns
	drop.Counters
}

// count sets the packets of the window between two readings.
func (w *paceWindow) count(last, now flow) {
	w.alone = now.alone - last.alone
	w.arrived = now.Arrived - last.Arrived
	w.arrived -= min(w.arrived, w.alone)
	w.passed = w.arrived - min(w.arrived, now.Held-last.Held)
	w.single, w.super = now.Small-last.Small, now.Super-last.Super
}

// work is a reading of the uplinks' counters.
type work struct {
	at     time.Time
	ran    map[container.Device]time.Duration // CPU time of their threads
	others uint64                             // packets for no isolated container
	heavy  map[container.Device]time.Time     // uplinks that worked more than law.Least within law.Window, or before they rested
	idle   map[int]time.Duration              // by CPU; nil if no uplink is heavy
}

// uplinkWindow holds the work of the uplinks in some time.
type uplinkWindow struct {
	since     time.Time // zero: no earlier reading
	length    time.Duration
	ran, idle time.Duration // CPU time of their threads, idle time of their CPUs
	heavy     bool          // at least one is heavy
	busy      bool          // their CPUs had no idle time
	others    uint64        // packets for no isolated container
}

// pace limits the packets of each flooded tenant at the uplinks, and decides whether the uplinks rest.
func (is *Isolator) pace(now time.Time) error {
	last := is.worked
	if is.host == nil || len(last.heavy) == 0 && now.Sub(last.at) < law.Window {
		return nil
	}
	w, err := is.work(now)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the kernel does not count
	}
	if err != nil {
		return err
	}
	is.worked = w
	if !is.around.at.IsZero() && now.Sub(is.around.at) > 2*law.Window { // the flood is over
		is.forgetAround()
	}
	u := w.after(last, is.cpus())
	all, paced, err := is.paceTenants(now, u)
	rate := u.perSecond(all.arrived)
	flood := paced || rate >= float64(is.cfg.QueueFlood) || u.bulk(all)
	if u.heavy && flood {
		err = errors.Join(err, is.lookAround(now))
	}
	if !u.since.IsZero() {
		w := restWindow{length: u.length, idle: u.idle, ran: u.ran, single: all.single, super: all.super, flood: flood}
		err = errors.Join(err, is.rest(w))
	}
	if !paced {
		rate = 0
	}
	return errors.Join(err, is.deferPolls(now, rate))
}

// ranSince returns how long the threads of an uplink have run since an earlier reading. It is 0 if that
// reading lacks the uplink. The counter falls if a rest has replaced the threads.
func (w work) ranSince(last work, key container.Device) time.Duration {
	before, known := last.ran[key]
	if !known {
		return 0
	}
	return max(0, w.ran[key]-before)
}

// after returns the work of the uplinks since an earlier reading. cpus are the CPUs that handle their
// packets; empty: all.
func (w work) after(last work, cpus []int) uplinkWindow {
	u := uplinkWindow{since: last.at, length: w.at.Sub(last.at), heavy: len(w.heavy) > 0, others: w.others - min(w.others, last.others)}
	for key := range w.ran {
		u.ran += w.ranSince(last, key)
	}
	if last.idle == nil || w.idle == nil {
		u.idle = u.length // unknown
		return u
	}
	for cpu, idle := range w.idle {
		if before, known := last.idle[cpu]; known && (len(cpus) == 0 || slices.Contains(cpus, cpu)) {
			u.idle += idle - before
		}
	}
	u.busy = float64(u.idle) < law.Least*float64(u.length)
	return u
}

func (u uplinkWindow) perSecond(packets uint64) float64 {
	return float64(packets) / max(u.length.Seconds(), time.Millisecond.Seconds())
}

// bulk reports whether the uplinks' threads have worked much for packets that are mostly super-packets.
// If single packets take as much time, it may go into context switches: see rest.go.
func (u uplinkWindow) bulk(w paceWindow) bool {
	return float64(w.uplinks) >= law.Most*law.Least*float64(u.length) && w.super > w.single
}

// paceTenants limits the packets of each flooded tenant, and reports whether there is one. all holds
// the packets of all tenants and all others.
func (is *Isolator) paceTenants(now time.Time, u uplinkWindow) (all paceWindow, paced bool, err error) {
	all = paceWindow{arrived: u.others, passed: u.others, uplinks: u.ran}
	windows := make(map[*isolation]paceWindow)
	err = is.counting(func(s *isolation) error {
		win := paceWindow{length: u.length}
		err := is.flows(s, u.since, now, u.heavy, &win)
		all.arrived, all.passed = all.arrived+win.alone+win.arrived, all.passed+win.alone+win.passed
		all.single, all.super = all.single+win.single, all.super+win.super
		windows[s] = win
		return err
	})
	err = errors.Join(err, is.counting(func(s *isolation) error {
		win := windows[s]
		before := s.pacing.rate
		passes := s.paced(win, all, u, is.cfg.QueueFlood)
		paced = paced || passes > 0
		if passes == 0 && before == 0 {
			return nil
		}
		if passes > 0 {
			passes += u.perSecond(win.alone)
		}
		return s.drops.Pace(passes, 2*law.Window)
	}))
	return all, paced, err
}

// paced counts a window of one tenant and returns the rate that passes from now on, in packets/s. all
// holds the packets of all tenants in the window.
func (s *isolation) paced(w, all paceWindow, u uplinkWindow, flood uint64) float64 {
	w.uplinks = time.Duration(float64(u.ran) * w.works() / max(1, all.works()+float64(u.others)))
	s.took += w.own + w.uplinks
	w.due, w.busy = s.dueIn(u.length), u.busy || s.due > 0 && u.idle < u.ran
	w.much = u.perSecond(w.arrived) >= float64(flood) || u.bulk(w)
	return s.pacing.next(w)
}

// counting calls do for each tenant with packet counters. It continues after an error.
func (is *Isolator) counting(do func(*isolation) error) error {
	var errs []error
	for _, s := range is.isolated {
		if s.drops != nil {
			errs = append(errs, IgnoreGone(do(s)))
		}
	}
	return errors.Join(errs...)
}

// work reads the uplinks' counters.
func (is *Isolator) work(now time.Time) (w work, err error) {
	last := is.worked
	w = work{at: now, ran: make(map[container.Device]time.Duration), heavy: make(map[container.Device]time.Time)}
	for key, u := range is.host.devices {
		for _, t := range u.threads {
			used, err := sched.UsageOf(is.cfg.Roots.Proc, t.Thread)
			if IgnoreGone(err) != nil {
				return w, err
			}
			w.ran[key] += used.Ran
		}
		if float64(w.ranSince(last, key)) > law.Least*float64(now.Sub(last.at)) {
			w.heavy[key] = now
		} else if at, was := last.heavy[key]; was && now.Sub(at) < law.Window {
			w.heavy[key] = at
		}
	}
	if is.resting.rests {
		w.heavy = last.heavy
	}
	if len(w.heavy) > 0 {
		works, err := irq.Works(is.cfg.Roots.Proc)
		if err != nil {
			return w, err
		}
		w.idle = make(map[int]time.Duration)
		for cpu, work := range works {
			w.idle[cpu] = work.Idle
		}
	}
	w.others, err = is.cfg.Drop.Others()
	return w, err
}

// cpus returns the CPUs to which the operator's RPS steers the heavy uplinks; empty: all.
func (is *Isolator) cpus() (list []int) {
	for key, u := range is.host.devices {
		if _, heavy := is.worked.heavy[key]; !heavy {
			continue
		}
		if len(u.at.cpus) == 0 {
			return nil
		}
		list = append(list, u.at.cpus...)
	}
	return list
}

// flows fills in the packets of a tenant's window, which began at since. It fills in the tenant's own
// time only if an uplink is heavy, since only then the tenant may have to be paced.
func (is *Isolator) flows(s *isolation, since, now time.Time, heavy bool, w *paceWindow) error {
	c, err := s.drops.Counters()
	if err != nil {
		return err
	}
	last := s.flow
	s.flow = flow{at: now, alone: s.alone, Counters: c}
	if last.at.IsZero() || last.at != since {
		return nil
	}
	w.count(last, s.flow)
	if !heavy {
		return nil
	}
	own, err := is.ranOf(s)
	if err != nil {
		return err
	}
	s.flow.own = own
	if last.own == 0 {
		return nil
	}
	w.own = max(1, own-last.own)
	s.quota, err = is.quota(s.payer)
	return err
}

// dueIn returns the CPU time that a tenant may take in a window; 0: no limit.
func (s *isolation) dueIn(length time.Duration) time.Duration {
	cpus := s.quota
	if cpus == 0 || s.due > 0 && s.due < cpus {
		cpus = s.due
	}
	if cpus == 0 {
		return 0
	}
	return max(1, time.Duration(cpus*float64(length)))
}

// ranOf returns the CPU time of a tenant's tasks and threads; 0: unknown.
func (is *Isolator) ranOf(s *isolation) (time.Duration, error) {
	dir := s.payer.TenantUsageGroup()
	if dir == "" {
		return 0, nil // a host without cgroup v2
	}
	sum, err := cgroup.Usage(dir)
	if err != nil || is.v2() {
		return sum, err
	}
	for _, t := range s.threads { // the cgroup v2 usage lacks threads in a v1 hierarchy
		used, err := sched.UsageOf(is.cfg.Roots.Proc, t.Thread)
		if err != nil {
			return 0, err
		}
		sum += used.Ran
	}
	return sum, nil
}
