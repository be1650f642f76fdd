package account

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/law"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/irq"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	// budget is how many packets a window looks at, if that takes from shortest to longest.
	budget   = 4 * few
	shortest = tick / 20
	longest  = tick

	// oneIn is how many softirqs one that is measured between windows stands for, a power of two.
	oneIn = 4

	// few is how many packets in a second cost less than windows do. With fewer, the programs stay
	// attached.
	few = law.Rate / 2

	// settling is how long a window's end waits for the softirqs that have begun in it.
	settling = 500 * time.Microsecond

	// While a culprit takes this part of a CPU from others in a window, and for calm after that, the
	// programs stay attached.
	Seen = 2 * law.Loss
	calm = 2 * tick

	// Packets are stamped while more than one in laterOf is sent later than its softirq, by a queue
	// or timer, and for calm after that. Fewer than laterFrom in a window are no reason.
	laterOf   = 50
	laterFrom = 20
)

// windows decides when the programs are attached. Meter.mu guards it.
type windows struct {
	estimate
	watch
	phase  phase
	need   Need      // of Demand
	tried  bool      // to measure what the programs take, although the need is Acted
	ends   bpf.Links // of the programs that begin and end a run, unless the phase is off
	others bpf.Links // of the others, in phases from full on
	err    error     // of the last turn

	// At the begin of the phase.
	began  time.Time
	start  counts
	off    float64 // ns that the programs take off for each packet: fl_own
	raw    Reading // without estimates
	states states

	// Until when, and until which counts, the work between windows is charged.
	at     time.Time
	counts counts

	most   float64   // of a CPU, which a culprit may take: Seen
	robbed time.Time // the last time that one took more
	later  time.Time // the last time that packets were sent later

	stop, done chan struct{}
}

// phase is what is attached.
type phase int

const (
	off     phase = iota // nothing, before the first phase and after an error
	bare                 // the two programs that begin and end a run, between windows: fl_bare
	full                 // all programs, for a window
	steady               // all programs, while there are few packets
	metered              // all programs, as something acts on the accounts
)

// states are sums of fl_cpus over the CPUs.
type states struct{ whole, bare, later uint64 }

// Need is what accounts are for. It decides when the programs are attached.
type Need int

const (
	Shown   Need = iota // in windows: nothing acts on the accounts
	Watched             // in windows, soon after a change: something acts if packets take time from others
	Acted               // always: something acts on the accounts
)

// Demand says what the accounts are needed for. Only an error to attach for Acted is returned. It has no
// effect without Config.Count.
func (m *Meter) Demand(need Need) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.windows
	if w == nil || m.closed {
		return nil
	}
	w.need, w.watch.hurried = need, need == Watched
	if need != Acted || w.phase == metered { // an earlier call may have failed to attach
		return nil // the next call of next does the rest
	}
	return m.turn(metered)
}

// Metering reports whether the programs see all packets at present. Otherwise the accounts grow by
// what the last window has shown.
func (m *Meter) Metering() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.windows == nil || m.windows.phase >= steady
}

// Err returns the error of the last window.
func (m *Meter) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.windows == nil || m.windows.err == nil {
		return nil
	}
	return fmt.Errorf("account windows: %w", m.windows.err)
}

// sample opens and closes windows until Close.
func (m *Meter) sample() {
	w := m.windows
	defer close(w.done)
	wait := time.NewTimer(tick)
	defer wait.Stop()
	for {
		select {
		case <-w.stop:
			return
		case <-wait.C:
			next := tick
			m.loop.Turn(func() { next = m.next() })
			wait.Reset(next)
		}
	}
}

// next begins or ends a phase if it is time, and returns after which time it is to be called again.
func (m *Meter) next() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.windows
	if m.closed {
		return tick
	}
	now := time.Now()
	counts := m.count()
	works, err := irq.Works(m.cfg.Proc)
	w.look(now, counts, works) // without works, all but changes of their time is seen
	if w.phase == bare {       // while the devices of a container that is about to end are there
		err = errors.Join(err, m.between(now, counts))
	}
	was, to := w.phase, w.want(now)
	if was == metered && w.rate >= few && w.gaps == 0 && !w.tried && now.Sub(w.robbed) >= calm {
		to, w.tried = bare, true // until the next look: nobody knows what the programs take, or is robbed
	}
	if to == bare && w.phase > full {
		w.pause = 0 // windows begin
	}
	switch {
	case to != bare:
	case w.phase == steady:
		to = full // what has just begun takes a small part of the steady phase, and may be a theft
	case w.phase < full && w.opens(now):
		to = full
	}
	if to == w.phase && (to == bare || to == steady && !w.opens(now)) {
		w.err = err
		return w.tick()
	}
	if to == bare || to == steady {
		w.rest(now)
	}
	w.err = errors.Join(err, m.turn(to))
	if want := w.want(time.Now()); was < metered && want > max(w.phase, full) {
		w.err = errors.Join(w.err, m.turn(want))
	}
	if w.phase == full {
		return w.length()
	}
	return w.tick()
}

// want returns the phase between two windows.
func (w *windows) want(now time.Time) phase {
	switch {
	case w.need == Acted || now.Sub(w.robbed) < calm:
		return metered
	case w.rate < few || w.phase == steady && w.rate < 2*few:
		return steady
	}
	return bare
}

// stamps reports whether packets are stamped in this phase.
func (w *windows) stamps(now time.Time) bool {
	return w.need == Acted || w.phase == metered || now.Sub(w.later) < calm
}

// turn ends a phase, takes up what it has shown, and begins another, or the same anew. After an
// error the phase may be off.
func (m *Meter) turn(to phase) error {
	w := m.windows
	from := w.phase
	stay := from >= full && to >= full // the programs stay attached
	var errs []error
	if !stay {
		errs = append(errs, m.vars.Bare.Set(uint8(oneIn)))
	}
	now, counts := time.Now(), m.count()
	if !stay {
		if from != off {
			time.Sleep(settling)
		}
		errs = append(errs, m.detach(min(from, to)))
	}
	errs = append(errs, m.take(from, now, counts))
	var window uint8
	if to != metered {
		window = 1
	}
	w.off = 0
	if to > full { // a window has to show it
		w.off = math.Trunc(w.programs())
	}
	errs = append(errs, m.vars.Window.Set(window), m.vars.Own.Set(uint64(w.off)))
	if !stay {
		if err := m.attachFor(to); err != nil {
			return errors.Join(append(errs, err, m.detach(off))...)
		}
	}
	if !stay && to >= full {
		errs = append(errs, m.reattach(nil), m.vars.Bare.Set(uint8(0))) // where it fails, the rest is metered
		now, counts = time.Now(), m.count()
		errs = append(errs, m.between(now, counts))
	}
	w.phase, w.began, w.start = to, now, counts
	return errors.Join(append(errs, m.stamp(w.stamps(now)))...)
}

// attachFor attaches the programs that a phase needs and that are not attached.
func (m *Meter) attachFor(to phase) (err error) {
	w := m.windows
	two := []*ebpf.Program{m.programs[exits], m.programs[enters]}
	if w.ends == nil {
		if w.ends, err = bpf.Attach(two...); err != nil {
			return err
		}
	}
	if to >= full && w.others == nil {
		inside := slices.DeleteFunc(slices.Clone(m.programs), func(p *ebpf.Program) bool { return slices.Contains(two, p) })
		if w.others, err = bpf.Attach(inside...); err != nil {
			return err
		}
	}
	w.phase = to
	return nil
}

// detach detaches the programs that a phase before full does not need.
func (m *Meter) detach(to phase) error {
	w := m.windows
	var errs []error
	was := w.phase
	w.phase = to
	if was >= full {
		errs = append(errs, w.others.Close(), m.reattach(nil))
		w.others = nil
	}
	if to == off {
		errs = append(errs, w.ends.Close())
		w.ends = nil
	}
	return errors.Join(errs...)
}

// between charges the work since the last phase that metered.
func (m *Meter) between(now time.Time, counts counts) error {
	w := m.windows
	states, err := m.states()
	if err != nil {
		return err
	}
	w.gap(counts.since(w.counts), now.Sub(w.at), time.Duration(states.bare-w.states.bare))
	w.at, w.counts, w.states = now, counts, states
	return nil
}

// take takes up what a phase has shown that ends now.
func (m *Meter) take(from phase, now time.Time, counts counts) error {
	w := m.windows
	if from < full {
		return m.between(now, counts)
	}
	was := w.states
	states, err := m.states()
	if err != nil {
		return err
	}
	w.states.whole, w.states.later = states.whole, states.later // what comes from now on is in between
	raw, err := m.read(true, false)
	if err != nil {
		return err
	}
	win := window{
		seen: raw.Since(w.raw), length: now.Sub(w.began), counts: counts.since(w.start),
		whole: time.Duration(states.whole - was.whole), own: w.off,
	}
	w.raw = raw
	w.at, w.counts = now, counts
	// The work of a container that has ended does not go on.
	maps.DeleteFunc(win.seen.Accounts, func(id container.ID, _ Account) bool {
		acc := m.accounts[id]
		return acc != nil && acc.state != watched
	})
	w.see(win)
	var packets uint64
	for _, a := range win.seen.Accounts {
		packets += a.packets()
	}
	if later := states.later - was.later; later >= laterFrom && later*laterOf > packets {
		w.later = now
	}
	if win.robbery() > w.most {
		w.robbed = now
	}
	return nil
}

// robbery returns the part of a CPU that the worst culprit took from others.
func (w window) robbery() (most float64) {
	took := make(map[container.ID]time.Duration)
	for of, d := range w.seen.Thefts {
		if of.Loss() {
			took[of.Culprit] += d
			most = max(most, float64(took[of.Culprit])/float64(max(w.length, shortest)))
		}
	}
	return most
}

// count returns what the kernel has counted for the watched containers.
func (m *Meter) count() counts {
	cs := make(counts)
	namespaces := make(map[uint64]map[int]netdev.Counters)
	for _, acc := range m.holders() {
		for _, d := range acc.member.Devices {
			if !d.HostEnd {
				continue
			}
			ns, ok := namespaces[d.Netns]
			if !ok {
				ns, _ = m.cfg.Count(d.Netns) // if there never were counters, the time counts
				namespaces[d.Netns] = ns
			}
			n, ok := ns[d.Ifindex]
			if ok {
				c := cs[acc.member.ID]
				cs[acc.member.ID] = count{c.in + n.TxPackets, c.out + n.RxPackets}
			}
		}
	}
	return cs
}

// states reads the sums of the CPUs' states.
func (m *Meter) states() (sum states, err error) {
	var cpus []accountCpu
	if err := m.maps.FlCpus.Lookup(uint32(0), &cpus); err != nil {
		return sum, err
	}
	for _, c := range cpus {
		sum.whole += c.Whole
		sum.bare += c.Bare
		sum.later += c.Later
	}
	return sum, nil
}
