package blockio

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// helpKey is a key that the agent decides where policy says auto, which is the default.
const helpKey = "fairlead.io.help"

// turnPeriod is the interval at which threads that take turns become real-time, each time for the
// budget's share of it. So they can never use up the budget: a thread without budget would wait for the
// rest of the second, but a thread between two turns still has its weight.
const turnPeriod = 100 * time.Millisecond

// turnPart is the part of the budget that turns use. The rest covers a turn that ends late.
const turnPart = 0.96

// maxTurned bounds how many threads of a container take turns.
const maxTurned = 256

// mayHelp returns which help a container's own tasks may get.
func (f *BlockIO) mayHelp(m *managed) (may decide.May) {
	t := m.target
	may.Help = cmp.Or(t.Settings.IOHelp, policy.HelpAuto)
	if origin(t, helpKey).From == fromController {
		may.Help = policy.HelpAuto
	}
	may.Weight = unweighable(t)
	grouped, err := f.bounded(t.Container.Cgroup.CPU)
	if err != nil {
		may.None = "no real time here: " + err.Error()
		return may
	}
	budget := f.mostFor(m)
	for id, o := range f.managed {
		if o != m && m.kept == 0 && f.actions[id].Help == policy.HelpTurns {
			budget += o.budget / 2 // its turns can become shorter
		}
	}
	if budget == 0 {
		may.None = fmt.Sprintf("all real time (%s in each second of each CPU) is given to others", decide.MaxRealtime)
		return may
	}
	k := cgroup.RT(t.Container.Cgroup.CPU)
	now, err := k.Read()
	// If the owner has set a budget, turns would demote the owner's real-time threads.
	may.Turns, may.Budget = grouped && err == nil && f.cfg.Journal.Given(k.Ref(), now) == "0", budget
	may.Profiled, _ = f.profiled(m.reserved)
	return may
}

// fromController is the origin of a decision.
const fromController = "controller"

// grant gives a container the real-time budget of its help, and reserves what its Target asks for. If
// that is refused, the container keeps its earlier reservation.
func (f *BlockIO) grant(m *managed) error {
	m.helpWant = f.helpWant(m.target)
	kept, err := f.mayKeep(m)
	if err == nil {
		m.kept = kept
	}
	f.apportion()
	return err
}

// mayKeep returns the real time to reserve for a container, or why its request is refused.
func (f *BlockIO) mayKeep(m *managed) (kept time.Duration, err error) {
	t := m.target
	if kept = t.Settings.Realtime; t.Settings.RealtimeAuto {
		kept, err = f.profiled(m.reserved)
	}
	if err == nil && kept > 0 {
		_, err = f.bounded(t.Container.Cgroup.CPU)
	}
	if err != nil {
		return 0, fmt.Errorf("io.realtime: %w", err)
	}
	sum := kept
	for _, o := range f.managed {
		if o != m { // a budget that is only help gives way
			sum += o.kept
		}
	}
	if kept > 0 && sum > decide.MaxRealtime {
		return 0, fmt.Errorf("io.realtime: %s for all containers, of at most %s in each second", sum, decide.MaxRealtime)
	}
	return kept, nil
}

// helpWant returns the budget that a Target's help asks for.
func (f *BlockIO) helpWant(t policy.Target) (want time.Duration) {
	switch t.Settings.IOHelp {
	case policy.HelpRealtime, policy.HelpTurns:
		return cmp.Or(f.actions[t.Container.ID].Budget, decide.MaxRealtime)
	}
	return 0
}

// profiled returns the budget that reservations need together, by the profiles of their disks.
func (f *BlockIO) profiled(reserved []reservation) (sum time.Duration, err error) {
	if len(reserved) == 0 {
		return 0, errors.New("auto: the container has reserved nothing (io.reserve)")
	}
	for _, r := range reserved {
		p := f.capacity(r.disk).Realtime
		if len(p) == 0 {
			return 0, fmt.Errorf("auto: %[1]s has no profile: measure it with `fairlead io calibrate %[1]s --scratch DIR --realtime`", r.device)
		}
		budget, err := p.Needs(r.figures)
		if err != nil {
			return 0, fmt.Errorf("auto: %s: %w", r.device, err)
		}
		sum += budget
	}
	return max(sum, time.Millisecond), nil
}

// mostFor returns the most real time that may help a container: its own reservation, or else what is
// neither reserved for others nor in use to help them. It returns 0 if that is too little to help.
func (f *BlockIO) mostFor(m *managed) time.Duration {
	if m.kept > 0 {
		return m.kept
	}
	left := decide.MaxRealtime
	for _, o := range f.managed {
		if o != m {
			left -= max(o.kept, o.budget)
		}
	}
	if left < decide.LeastBudget {
		return 0
	}
	return left
}

// apportion divides real time among the containers that it helps. Budgets that were decided by need
// come first, and whole or not at all: two may be decided in the same window, and a container with less
// than it needs would wait for most of each second. Turns share what is left.
func (f *BlockIO) apportion() {
	var needed, rest []container.ID
	for _, id := range slices.Sorted(maps.Keys(f.managed)) {
		m := f.managed[id]
		switch m.budget = 0; {
		case m.helpWant == 0:
		case f.actions[id].Help == policy.HelpRealtime:
			needed = append(needed, id)
		default:
			rest = append(rest, id)
		}
	}
	for i, id := range slices.Concat(needed, rest) {
		m := f.managed[id]
		most := f.mostFor(m)
		if i >= len(needed) && m.kept == 0 {
			most /= time.Duration(len(needed) + len(rest) - i)
		} else if i < len(needed) && most < m.helpWant {
			continue
		}
		if grouped, err := f.bounded(m.target.Container.Cgroup.CPU); err == nil {
			m.budget, m.grouped = min(m.helpWant, most), grouped
		}
	}
}

// turning gives threads of one container their turns as real-time threads.
type turning struct {
	dir      string
	on       time.Duration // real-time part of each turnPeriod
	stop     chan struct{}
	done     chan struct{}
	promoted atomic.Int64
}

// takeTurns starts and ends the turns of containers. At the end the threads stay as they are: the knob
// of the budget makes them ordinary.
func (f *BlockIO) takeTurns() {
	for _, m := range f.managed {
		on := time.Duration(0)
		if m.target.Settings.IOHelp == policy.HelpTurns && m.helpWant > 0 && m.grouped {
			on = time.Duration(float64(turnPeriod) * m.budget.Seconds() * turnPart)
		}
		if m.turning != nil && m.turning.on != on {
			m.turning.end()
			m.turning = nil
		}
		if m.turning == nil && on > 0 {
			m.turning = &turning{dir: m.target.Container.Cgroup.V2, on: on, stop: make(chan struct{}), done: make(chan struct{})}
			go m.turning.run(&f.loop)
		}
	}
}

func (t *turning) end() {
	close(t.stop)
	<-t.done
}

func (t *turning) run(in *feature.Loop) {
	defer close(t.done)
	for over := false; !over; { // after a panic Turn skips its function without waiting
		in.Turn(func() { t.turns(); over = true })
		if !over {
			select {
			case <-t.stop:
				return
			case <-time.After(turnPeriod):
			}
		}
	}
}

// turns takes turns until stop is closed.
func (t *turning) turns() {
	urgent()
	wait := func(d time.Duration) (on bool) {
		if d > 0 {
			rest := unix.NsecToTimespec(d.Nanoseconds())
			unix.Nanosleep(&rest, nil) // on this thread: the runtime's timers run on others
		}
		select {
		case <-t.stop:
			return false
		default:
			return true
		}
	}
	for {
		start := time.Now()
		tids, err := cgroup.Threads(t.dir, maxTurned)
		if err != nil && !wait(turnPeriod) { // the cgroup has gone, and the agent will end the turns
			return
		}
		n := 0
		for _, tid := range tids {
			if promoted(tid) {
				n++
			}
		}
		t.promoted.Store(int64(n))
		if !wait(t.on - time.Since(start)) {
			return
		}
		for _, tid := range tids {
			if a, err := unix.SchedGetAttr(tid, 0); err == nil && a.Policy == unix.SCHED_RR && a.Priority == realtimePriority {
				cgroup.Relax(tid)
			}
		}
		if !wait(turnPeriod - time.Since(start)) {
			return
		}
	}
}

// urgent locks this goroutine to a thread that preempts threads that take turns, as far as the kernel
// allows: if it ended a turn late, the turn would use up the budget.
func urgent() {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	unix.Setpriority(unix.PRIO_PROCESS, 0, -20)
	unix.SchedSetAttr(0, &unix.SchedAttr{
		Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: realtimePriority + 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
	}, 0)
}

// adoptHelp finds in the journal the help that an earlier agent gave.
func (f *BlockIO) adoptHelp(left []journal.Entry) (out []policy.Decision) {
	was := make(map[container.ID]policy.Decision)
	for _, e := range left {
		id := container.ID(e.Owner.Container)
		level := policy.HelpWeight
		switch file := filepath.Base(e.Ref.Object); {
		case id == 0:
			continue
		case e.Ref.Kind == cgroup.KindRT:
			level = policy.HelpTurns
		case e.Ref.Kind == cgroup.KindFile && (file == "cpu.shares" || file == "cpu.weight") && e.Value != cgroup.Idled, e.Ref.Kind == cgroup.KindSlices:
			if _, more := was[id]; more {
				continue
			}
		default:
			continue
		}
		was[id] = policy.Decision{Container: id, Key: helpKey, Value: string(level), Reason: "an earlier agent decided so", Since: e.When, Expiry: e.Expiry}
	}
	for _, id := range slices.Sorted(maps.Keys(was)) {
		d := was[id]
		f.control.AdoptHelp(id, policy.Help(d.Value), d.Reason, d.Since, time.Now())
		f.decided[decided{id, helpKey}] = true
		out = append(out, d)
	}
	return out
}

// helpText describes the help that a container gets.
func helpText(a decide.Action, m *managed) string {
	budget := a.Budget
	if m != nil && m.helpWant > 0 {
		budget = m.budget
	}
	switch a.Help {
	case policy.HelpWeight:
		return "the largest weight at CPUs"
	case policy.HelpRealtime:
		return fmt.Sprintf("real-time for %s in each second of each CPU", budget)
	case policy.HelpTurns:
		return fmt.Sprintf("the largest weight at CPUs, and real-time for %s of each %s", time.Duration(float64(turnPeriod)*budget.Seconds()).Round(time.Millisecond), turnPeriod)
	}
	return ""
}

// shorten gives new threads of helped containers the slice that the others have.
func (f *BlockIO) shorten() error {
	var errs []error
	for _, m := range f.managed {
		dir := m.target.Container.Cgroup.V2
		if len(f.cfg.Journal.Claims(cgroup.Slices(dir).Ref())) > 0 {
			if err := cgroup.Shorten(dir); err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, errors.ErrUnsupported) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
