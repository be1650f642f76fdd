package isolate

import (
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/ledger"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// The threads of the uplinks work for a container before its own thread does, in a group that
// weighs as much as one container. So a flood takes time from others that the receiver's quota does
// not pay for. While it comes in and their CPUs have no idle time, the quota pays for that work as
// well: the uplinks let only as many of its packets pass as it has time left for.
const (
	paceLeast = 1_000 // packets/s that pass in any case
	paceGrow  = 1.1   // per window, while there is time left
	paceIdle  = 0.05  // of a CPU: with more idle time nobody goes short
	paceWork  = 0.05  // of a CPU: uplinks that work less take nothing worth mentioning

	paceQuiet = time.Second     // the time between looks at uplinks that work less
	paceLasts = 2 * time.Second // the agent may be late, but not hang
)

// paceWindow is what the packets of one container cost in some time.
type paceWindow struct {
	length  time.Duration
	arrived uint64        // packets that came by uplinks,
	passed  uint64        // and the part that was not dropped
	own     time.Duration // of the container's tasks and threads
	uplinks time.Duration // of their threads, for its packets
	quota   time.Duration // 0: none
	busy    bool          // the CPUs of the uplinks had no idle time
}

// paceControl decides how many packets of one container may pass the uplinks. The zero value lets
// all pass.
type paceControl struct{ rate float64 }

// next counts one window and returns the rate from now on, in packets/s; 0 is any. Fewer packets/s
// than a flood are not worth it.
func (c *paceControl) next(w paceWindow, flood uint64) float64 {
	perSecond := func(n uint64) float64 { return float64(n) / w.length.Seconds() }
	if w.quota == 0 || w.length <= 0 || perSecond(w.arrived) < float64(flood) {
		c.rate = 0
		return c.rate
	}
	may := w.own + ledger.Remaining(w.quota, w.own, ledger.DefaultReserve)
	fits := float64(may) / float64(max(1, w.own+w.uplinks)) // the part of the packets
	switch {
	case w.busy && fits < 1:
		c.rate = max(paceLeast, fits*perSecond(w.passed))
	case c.rate > 0:
		grow := paceGrow
		if w.busy {
			grow = min(fits, grow)
		}
		if c.rate *= grow; c.rate > perSecond(w.arrived) {
			c.rate = 0
		}
	}
	return c.rate
}

// flow is pace's last reading of one tenant.
type flow struct {
	at               time.Time
	own              time.Duration
	arrived, dropped uint64
}

// work is pace's last reading of the uplinks.
type work struct {
	at      time.Time
	ran     map[container.Device]time.Duration // of their threads
	unowned uint64                             // packets for nobody isolated or charged
	heavy   map[container.Device]bool          // worked for more than paceWork
	idle    time.Duration                      // of their CPUs, if one is heavy
}

// pace limits the packets of each flooded tenant at the uplinks.
func (is *Isolator) pace(now time.Time) error {
	last := is.worked
	if is.host == nil || len(last.heavy) == 0 && now.Sub(last.at) < paceQuiet {
		return nil
	}
	w, err := is.work(now)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the kernel does not count
	}
	if err != nil {
		return err
	}
	length := now.Sub(last.at)
	var ran time.Duration
	w.heavy = make(map[container.Device]bool)
	for key, sum := range w.ran {
		part := max(0, sum-last.ran[key])
		ran += part
		if !last.at.IsZero() && float64(part) > paceWork*float64(length) {
			w.heavy[key] = true
		}
	}
	if len(w.heavy) > 0 {
		if w.idle, err = is.idle(); err != nil {
			return err
		}
	}
	is.worked = w
	busy := len(last.heavy) > 0 && float64(w.idle-last.idle) < paceIdle*float64(length)
	all := w.unowned - last.unowned
	windows := make(map[*isolation]paceWindow)
	err = is.counting(func(s *isolation) error {
		win := paceWindow{length: length, busy: busy}
		err := is.flows(s, last.at, now, len(w.heavy) > 0, &win)
		all += win.arrived
		windows[s] = win
		return err
	})
	var flood float64 // packets/s
	err = errors.Join(err, is.counting(func(s *isolation) error {
		win := windows[s]
		win.uplinks = time.Duration(float64(ran) * float64(win.arrived) / float64(max(1, all)))
		before := s.pacing.rate
		rate := s.pacing.next(win, is.cfg.QueueFlood)
		if rate > 0 {
			flood = float64(all) / length.Seconds()
		} else if before == 0 {
			return nil
		}
		return s.drops.Pace(rate, paceLasts)
	}))
	return errors.Join(err, is.deferPolls(now, flood))
}

// counting calls do for each tenant whose packets are counted. It goes on after an error.
func (is *Isolator) counting(do func(*isolation) error) error {
	var errs []error
	for _, s := range is.isolated {
		if s.drops != nil {
			errs = append(errs, IgnoreGone(do(s)))
		}
	}
	return errors.Join(errs...)
}

// work reads what the uplinks have done so far.
func (is *Isolator) work(now time.Time) (w work, err error) {
	w = work{at: now, ran: make(map[container.Device]time.Duration)}
	for key, u := range is.host.devices {
		for _, t := range u.threads {
			used, err := sched.UsageOf(is.cfg.Roots.Proc, t.Thread)
			if IgnoreGone(err) != nil {
				return w, err
			}
			w.ran[key] += used.Ran
		}
	}
	w.unowned, err = is.cfg.Drop.Unowned()
	return w, err
}

// idle returns how long the CPUs that the uplinks' threads may use have idled.
func (is *Isolator) idle() (sum time.Duration, err error) {
	cpus := make(map[int]bool) // none: any
	for _, u := range is.host.devices {
		for _, cpu := range u.at.cpus {
			cpus[cpu] = true
		}
	}
	works, err := irq.Works(is.cfg.Roots.Proc)
	for cpu, work := range works {
		if len(cpus) == 0 || cpus[cpu] {
			sum += work.Idle
		}
	}
	return sum, err
}

// flows completes a window of one tenant, which began at since, by its packets; its quota stays 0
// unless it may have to be paced.
func (is *Isolator) flows(s *isolation, since, now time.Time, heavy bool, w *paceWindow) error {
	c, err := s.drops.Counters()
	if err != nil {
		return err
	}
	last := s.flow
	s.flow = flow{at: now, arrived: c.Arrived, dropped: c.Dropped}
	if last.at.IsZero() || last.at != since {
		return nil
	}
	w.arrived = c.Arrived - last.arrived
	w.passed = w.arrived - min(w.arrived, c.Dropped-last.dropped)
	if !heavy || is.ownsQueue(s) {
		return nil
	}
	own, err := is.ranOf(s)
	if err != nil {
		return err
	}
	s.flow.own = own
	dir, err := s.payer.TenantGroup()
	if err != nil || last.own == 0 {
		return err
	}
	cpus, limited, err := is.quota(dir)
	if err != nil || !limited {
		return err
	}
	w.own, w.quota = own-last.own, time.Duration(cpus*float64(w.length))
	return nil
}

// ownsQueue reports whether a tenant has a queue of an uplink, and so pays for its thread.
func (is *Isolator) ownsQueue(s *isolation) bool {
	if !s.queues {
		return false // whatever its packets would earn it
	}
	for _, u := range is.host.devices {
		for _, q := range u.queues {
			if q.control.owner == s.drops.Slot() {
				return true
			}
		}
	}
	return false
}

// ranOf returns the time that the tasks and threads of a tenant have run; 0 if it is not known.
func (is *Isolator) ranOf(s *isolation) (time.Duration, error) {
	dir := s.payer.Cgroup.V2
	if dir == "" {
		return 0, nil // a host without cgroup v2
	}
	if s.payer.PodCgroup {
		dir = filepath.Dir(dir)
	}
	sum, err := cgroup.Usage(dir)
	if err != nil || is.v2() {
		return sum, err
	}
	for _, t := range s.threads { // they are in another hierarchy
		used, err := sched.UsageOf(is.cfg.Roots.Proc, t.Thread)
		if err != nil {
			return 0, err
		}
		sum += used.Ran
	}
	return sum, nil
}
