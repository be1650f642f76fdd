package account

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// delta is the difference of two readings.
type delta struct {
	l           *lab
	t           testing.TB // reports failures
	now         Reading
	seconds     float64
	softirq     time.Duration
	thread      time.Duration
	accounts    map[container.ID]Account
	thefts      map[Pair]time.Duration
	readingLost uint64
}

// trial collects the failures of one reading.
type trial struct {
	testing.TB
	wrong []string
}

func (t *trial) Error(args ...any) { t.wrong = append(t.wrong, fmt.Sprintln(args...)) }

func (t *trial) Errorf(format string, args ...any) {
	t.wrong = append(t.wrong, fmt.Sprintf(format+"\n", args...))
}

// settled is the time after which missing packets no longer arrive.
const settled = 3 * time.Second

// await waits until done returns "". Until then done returns what is missing.
func (l *lab) await(done func() string) {
	l.t.Helper()
	testkit.AwaitNone(l.t, done)
}

// got waits until a generator has counted n packets, requests or reads.
func (l *lab) got(b *load.Board, n uint64) {
	l.t.Helper()
	l.counts("packets", n, func() uint64 { return b.Read().Since(load.Reading{}).Ops })
}

// gotBytes is got for generators that count bytes.
func (l *lab) gotBytes(b *load.Board, n uint64) {
	l.t.Helper()
	l.counts("bytes", n, func() uint64 { return b.Read().Since(load.Reading{}).Bytes })
}

func (l *lab) counts(what string, n uint64, read func() uint64) {
	l.t.Helper()
	l.await(func() string {
		if got := read(); got < n {
			return fmt.Sprintf("%d of %d %s have come", got, n, what)
		}
		return ""
	})
}

// expect waits until the accounts since the start of the lab add up and satisfy check. Charges of a
// run become readable when the run ends, and packets that arrive during a read are in one number
// and not yet in the other. So a reading is exact only at some moments; one comes soon after the
// last packet.
func (l *lab) expect(check func(delta)) {
	l.t.Helper()
	l.expectAny((delta).exact, check)
}

func (l *lab) expectAny(checks ...func(delta)) {
	l.t.Helper()
	var last delta
	begun := time.Now()
	defer func() { l.t.Log(last) }()
	l.await(func() string {
		last = l.between(l.began, l.read())
		t := &trial{TB: l.t}
		last.t = t
		for _, check := range checks {
			check(last)
		}
		if len(t.wrong) != 0 && time.Since(begun) > settled {
			l.softirqs.SkipIfMissed()
		}
		return strings.Join(t.wrong, "")
	})
}

func (l *lab) between(a, b Reading) delta {
	d := b.Since(a)
	return delta{l: l, t: l.t, now: b, seconds: b.Taken.Sub(a.Taken).Seconds(), softirq: d.Softirq, thread: d.Thread,
		accounts: d.Accounts, thefts: d.Thefts, readingLost: d.Lost}
}

func (d delta) of(b *sandbox.Box) Account { return d.accounts[d.l.ids[b]] }

func (d delta) system() Account { return d.accounts[System] }

// stolen returns the time that a culprit took from a victim's tasks.
func (d delta) stolen(victim, culprit *sandbox.Box) time.Duration {
	return d.stole(culprit, Party{Container: d.l.ids[victim], Kind: Task})
}

func (d delta) String() string {
	var s strings.Builder
	name := map[container.ID]string{System: "system"}
	for b, id := range d.l.ids {
		name[id] = strings.TrimPrefix(b.Name, "acc-")
	}
	fmt.Fprintf(&s, "%.2fs softirq %v thread %v lost %d\n", d.seconds, d.softirq, d.thread, d.readingLost)
	for id, a := range d.accounts {
		if name[id] == "" {
			continue // of another lab
		}
		fmt.Fprintf(&s, "  %-10s %12v own %12v", name[id], a.CPU(), a.Own)
		for p := range Protocols {
			if w := a.Receive[p]; w != (Work{}) {
				fmt.Fprintf(&s, "  rx %v %v", p, w)
			}
			if w := a.Send[p]; w != (Work{}) {
				fmt.Fprintf(&s, "  tx %v %v", p, w)
			}
		}
		s.WriteByte('\n')
	}
	for t, ns := range d.thefts {
		if ns > 0 {
			fmt.Fprintf(&s, "  %s from %s %v: %v\n", name[t.Culprit], name[t.Victim.Container], t.Victim.Kind, ns)
		}
	}
	return s.String()
}

// exact checks, to the nanosecond, the invariants of every reading.
func (d delta) exact() {
	d.t.Helper()
	d.sums()
	if d.readingLost != 0 {
		d.t.Errorf("%d charges lost", d.readingLost)
	}
	charges := d.l.charges()
	for b, id := range d.l.ids {
		charge, ok := charges[id]
		if !ok {
			continue
		}
		charge -= d.l.charged[id]
		a := d.of(b)
		var by, took, of, robbed time.Duration
		for t, ns := range d.thefts {
			if t.Culprit == id {
				by += ns
				if t.Victim.Kind == Task || t.Victim.Kind == Peer || t.Victim.Kind == Ksoftirqd {
					took += ns
				}
			}
			if t.Victim.Container == id {
				of += ns
				if t.Victim.Kind == Task || t.Victim.Kind == Peer {
					robbed += ns
				}
			}
		}
		if a.CPU() != a.Own+by || a.Took != took || a.Robbed != robbed || charge != by-of {
			d.t.Errorf("%s: %v, own %v, took %v, lost %v, charge %v; by the pairs it took %v in all and %v from tasks, and lost %v in all and %v of its tasks",
				b.Name, a.CPU(), a.Own, a.Took, a.Robbed, charge, by, took, of, robbed)
		}
	}
}

// sums is exact without the single thefts.
func (d delta) sums() {
	d.t.Helper()
	sum := d.now.Gone
	for _, a := range d.now.Accounts {
		sum += a.CPU()
	}
	if total := d.now.Softirq + d.now.Thread; sum != total {
		d.t.Errorf("the accounts come to %v, softirqs and threads to %v", sum, total)
	}
}

// received checks how many packets a container was charged for, and that their cost is not 0.
func (d delta) received(b *sandbox.Box, p Protocol, packets, bytes uint64) {
	d.t.Helper()
	d.counted(b.Name+" receives "+p.String(), d.of(b).Receive[p], packets, bytes)
}

// sent is received for the other direction.
func (d delta) sent(b *sandbox.Box, p Protocol, packets, bytes uint64) {
	d.t.Helper()
	d.counted(b.Name+" sends "+p.String(), d.of(b).Send[p], packets, bytes)
}

func (d delta) counted(what string, w Work, packets, bytes uint64) {
	d.t.Helper()
	if w.Packets != packets || w.Bytes != bytes || w.CPU <= 0 {
		d.t.Errorf("%s: %d packets of %d bytes in %v, want %d of %d", what, w.Packets, w.Bytes, w.CPU, packets, bytes)
	}
}

// streamed checks that a container was charged for the packets of so many bytes, however many
// packets that were, and for their acknowledgements.
func (d delta) streamed(data, acks Work, bytes uint64) {
	d.t.Helper()
	if data.Bytes < bytes || data.Packets == 0 || data.CPU <= 0 || acks.Packets == 0 || acks.CPU <= 0 {
		d.t.Errorf("%+v and acknowledgements %+v for %d bytes", data, acks, bytes)
	}
}

// on returns a container's charges on one CPU since Watch.
func (d delta) on(b *sandbox.Box, cpu int) accountAccount {
	d.t.Helper()
	slot, _ := d.l.m.Slot(d.l.ids[b])
	var all []accountAccount
	must(d.t, d.l.m.maps.FlAccounts.Lookup(slot, &all))
	return all[cpu]
}

// nothing checks that other packets are not charged to these containers.
func (d delta) nothing(boxes ...*sandbox.Box) {
	d.t.Helper()
	for _, b := range boxes {
		a := d.of(b)
		a.Robbed = 0
		if a != (Account{}) {
			d.t.Errorf("%s is charged %+v", b.Name, a)
		}
	}
}

// robs checks that a culprit's packets took time from others. The victim is chance, even if a
// container computes on their CPU: on an emulated CPU, kernel threads lose most of the time.
func (d delta) robs(culprit *sandbox.Box) {
	d.t.Helper()
	var taken time.Duration
	for t, ns := range d.thefts {
		if id := d.l.ids[culprit]; t.Culprit == id && t.Victim.Container != id {
			taken += ns
		}
	}
	if taken <= 0 {
		d.t.Errorf("%s took nobody's time", culprit.Name)
	}
}
