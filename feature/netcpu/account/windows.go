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
	// budget is the number of packets that a window examines, if that takes from shortest to longest.
	budget   = 4 * few
	shortest = tick / 20
	longest  = tick

	// oneIn is a power of two: between windows one softirq in oneIn is measured.
	oneIn = 4

	// few is the rate, in packets/s, below which programs at each packet cost less than windows, so
	// that all programs stay attached.
	few = law.Rate / 2

	// settling is the wait at the end of a window for the softirqs that have begun in it.
	settling = 500 * time.Microsecond

	// Seen is the share of a CPU from which a culprit's theft keeps the programs attached, until calm
	// after it ends.
	Seen = 2 * law.Loss
	calm = 2 * tick

	// Packets are stamped while a queue or timer sends more than one in laterOf after its softirq, and
	// for calm after that. Fewer than laterFrom in a window do not count.
	laterOf   = 50
	laterFrom = 20
)

// windows decides when the programs are attached. Meter.mu guards it.
type windows struct {
	estimate
	watch
	phase  phase
	need   Need      // from Demand
	tried  bool      // has measured the programs' own time although the need was Acted
	ends   bpf.Links // programs at the entry and exit of softirqs, unless the phase is off
	others bpf.Links // the other programs, in phases from full on
	err    error     // from the last turn

	// State at the start of the phase.
	began  time.Time
	start  counts
	off    float64 // ns that the programs take off for each packet: fl_own
	raw    Reading // without estimates
	states states

	// The work between windows is charged up to this time and these counts.
	at     time.Time
	counts counts

	most   float64   // share of a CPU that a culprit may take: Seen
	robbed time.Time // last time that a culprit took more
	later  time.Time // last time that packets were sent after their softirq

	stop, done chan struct{}
}

// phase says which programs are attached.
type phase int

const (
	off     phase = iota // none, before the first phase and after an error
	bare                 // the two programs at entry and exit of softirqs, between windows: fl_bare
	full                 // all, for a window
	steady               // all, while there are few packets
	metered              // all, because a mode acts on the accounts or a culprit takes Seen
)

// states are sums of fl_cpus over the CPUs.
type states struct{ whole, bare, later uint64 }

// Need is the purpose of the accounts. It decides when the programs are attached.
type Need int

const (
	Shown   Need = iota // attached in windows: no mode acts on the accounts
	Watched             // attached in windows, soon after a change: a mode acts if packets rob others
	Acted               // always attached: a mode acts on the accounts
)

// Demand sets the purpose of the accounts. It returns an error only if it cannot attach the programs for
// Acted. It has no effect without Config.Count.
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

// Metering reports whether the programs see all packets now. Otherwise the accounts grow by estimates
// from the last windows.
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

// next begins or ends a phase if it is time. It returns the time until the next call.
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
	w.look(now, counts, works) // without works it sees only the changes of packets
	if w.phase == bare {       // count before the devices of a container go
		err = errors.Join(err, m.between(now, counts))
	}
	was, to := w.phase, w.want(now)
	if was == metered && w.rate >= few && w.gaps == 0 && !w.tried && now.Sub(w.robbed) >= calm {
		to, w.tried = bare, true // until the next look, to measure the programs' own time
	}
	if to == bare && w.phase > full {
		w.pause = 0 // windows begin
	}
	switch {
	case to != bare:
	case w.phase == steady:
		to = full // new traffic is a small part of the steady phase, and may be a theft
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

// want returns the phase that follows a window.
func (w *windows) want(now time.Time) phase {
	switch {
	case w.need == Acted || now.Sub(w.robbed) < calm:
		return metered
	case w.rate < few || w.phase == steady && w.rate < 2*few:
		return steady
	}
	return bare
}

// stamps reports whether the phase stamps packets.
func (w *windows) stamps(now time.Time) bool {
	return w.need == Acted || w.phase == metered || now.Sub(w.later) < calm
}

// turn ends a phase, takes its result, and begins another phase or the same one again. After an error
// the phase may be off.
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
	if to > full { // a window must show the programs' own time
		w.off = math.Trunc(w.programs())
	}
	errs = append(errs, m.vars.Window.Set(window), m.vars.Own.Set(uint64(w.off)))
	if !stay {
		if err := m.attachFor(to); err != nil {
			return errors.Join(append(errs, err, m.detach(off))...)
		}
	}
	if !stay && to >= full {
		errs = append(errs, m.reattach(nil), m.vars.Bare.Set(uint8(0))) // meter in spite of an error
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

// detach detaches the programs that a phase below full does not need.
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

// between charges the estimated work since the end of the last window, or since the last call.
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

// take takes the result of a phase that ends now.
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
	w.states.whole, w.states.later = states.whole, states.later // later growth belongs to the gap
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
	// A container that has ended does no work in the gap.
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

// robbery returns the share of a CPU that the worst culprit took from others.
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

// count returns the kernel's packet counts of the watched containers.
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
				ns, _ = m.cfg.Count(d.Netns) // without counters, estimates use the time
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

// states reads the states of all CPUs and returns their sum.
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
