package account

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// byHand opens a Meter whose phases the test chooses.
func byHand(t testing.TB) *Meter {
	t.Helper()
	testkit.NeedRoot(t)
	cfg := config(t)
	cfg.exact, cfg.byHand = seconds(), true
	find := netdev.NewFinder("/proc", time.Now)
	cfg.Count = func(netns uint64) (map[int]netdev.Counters, error) {
		ns, err := find.Open("", netns)
		if err != nil {
			return nil, err
		}
		counts, err := ns.AllCounters(netdev.MostLinks)
		return counts, errors.Join(err, ns.Close())
	}
	m, err := Open(cfg)
	must(t, err)
	t.Cleanup(func() { must(t, m.Close()) })
	m.windows.most = 100 // none
	return m
}

func attachedPrograms(m *Meter) int {
	return len(m.links) + len(m.windows.ends) + len(m.windows.others)
}

// Packets that come while no program sees them are counted by the kernel, and cost what packets
// cost in the window before. So it is for what is received and for what is sent.
func TestWindows(t *testing.T) {
	testkit.InFull(t)
	m := byHand(t)
	f := newFabric(t, m)
	box := f.add("box", 2)
	f.rps(box, "eth0", "2")
	in, out := f.receive(box, 0, ":9000"), f.receive(f.wire, 1, ":9000")
	turn := func(to phase) {
		t.Helper()
		m.mu.Lock()
		defer m.mu.Unlock()
		must(t, m.turn(to))
	}
	exchange := func() {
		t.Helper()
		was, sent := in.Read().Since(load.Reading{}).Ops, out.Read().Since(load.Reading{}).Ops
		f.send(f.wire, 1, packets, "udp-send", "10.66.0.2:9000")
		f.send(box, 0, packets, "udp-send", "10.66.0.1:9000")
		f.got(in, was+packets)
		f.got(out, sent+packets)
	}
	if n := attachedPrograms(m); n != 0 {
		t.Fatalf("%d programs are attached before the first window", n)
	}
	exchange() // not before a window
	turn(full)
	exchange()
	turn(bare)
	if n := attachedPrograms(m); n != 2 || m.stamping {
		t.Fatalf("%d programs are attached between windows, want 2; stamping %v", n, m.stamping)
	}
	metered := f.read()
	exchange()
	exchanged := func(since Reading, when string) {
		t.Helper()
		l := *f.lab
		l.began = since
		l.expectAny(func(d delta) {
			for _, w := range []Work{d.of(box).Receive[UDP], d.of(box).Send[UDP]} {
				if w.Packets != packets || w.Bytes == 0 || w.CPU == 0 {
					d.t.Errorf("%+v %s, want %d packets", w, when, packets)
				}
			}
		})
	}
	exchanged(metered, "between windows")

	if m.windows.states.bare == 0 || m.windows.own == 0 {
		t.Errorf("softirqs took %v ns between windows, and the programs %v for each packet before", m.windows.states.bare, m.windows.own)
	}
	turn(full)
	if n := attachedPrograms(m); n != len(m.programs) {
		t.Errorf("%d of %d programs are attached in a second window", n, len(m.programs))
	}
	was := f.read()
	exchange()
	exchanged(was, "in a full window")
	turn(bare)
	if d := f.between(was, f.read()).of(box); d.Receive[UDP].Packets != packets || d.Send[UDP].Packets != packets {
		t.Errorf("%d packets received, %d sent after a full window, want %d", d.Receive[UDP].Packets, d.Send[UDP].Packets, packets)
	}
	if n := attachedPrograms(m); n != 2 {
		t.Errorf("%d programs are attached in the end, want 2", n)
	}
}

// While something acts on the accounts, the programs stay attached, and packets are stamped.
func TestDemand(t *testing.T) {
	m := byHand(t)
	f := newFabric(t, m)
	box := f.add("box", 2)
	f.rps(box, "eth0", "2")
	r := f.receive(box, 0, ":9000")
	must(t, m.Demand(Acted))
	if n := attachedPrograms(m); !m.stamping || n != len(m.programs) || m.accounts[f.ids[box]].stamps.Len() != 1 {
		t.Fatalf("stamping %v, %d of %d programs", m.stamping, n, len(m.programs))
	}
	f.send(f.wire, 1, packets, "udp-send", "10.66.0.2:9000")
	f.got(r, packets)
	f.expect(func(d delta) {
		if w := d.of(box).Receive[UDP]; w.Packets != packets {
			d.t.Errorf("%+v, want %d packets", w, packets)
		}
	})
	// What the programs take is not known. It is looked for once, and not while others are robbed.
	w := m.windows
	w.looked, w.rate = time.Now().Add(time.Hour), few
	for i, want := range []phase{metered, bare, metered, metered} {
		if w.robbed = (time.Time{}); i == 0 {
			w.robbed = time.Now()
		}
		if m.next(); w.phase != want {
			t.Errorf("phase %d after %d looks, want %d", w.phase, i+1, want)
		}
	}
	w.looked = time.Time{}
	must(t, m.Demand(Shown))
	m.next()
	if m.windows.phase != steady || m.stamping {
		t.Errorf("phase %d, stamping %v with few packets, want steady, and no stamps", m.windows.phase, m.stamping)
	}
	must(t, m.turn(bare))
	if m.windows.phase != bare || m.stamping || attachedPrograms(m) != 2 || m.accounts[f.ids[box]].stamps.Len() != 0 {
		t.Errorf("phase %d, stamping %v, %d programs: want two", m.windows.phase, m.stamping, attachedPrograms(m))
	}
}

// The interrupts before softirqs are no work of the programs: what is measured between windows has none.
// However large the overhead around one, it does not reach back into the run before: no CPU is charged
// more than the time that passes.
func TestInterruptsNotOwn(t *testing.T) {
	m := byHand(t)
	f := newFabric(t, m)
	box := f.add("box", 2)
	r := f.receive(box, 0, ":9000")
	const each = time.Second
	var softirq, whole time.Duration
	sent := uint64(0)
	testkit.Await(t, "softirqs after interrupts", func() bool { // on a busy CPU they follow others' work
		began := time.Now()
		must(t, m.turn(full))
		must(t, m.vars.AroundCall.Set(uint64(each))) // each reaches back to the run before
		was, before := f.read(), m.windows.states
		f.send(f.wire, 1, packets, "udp-send", "10.66.0.2:9000")
		sent += packets
		f.got(r, sent)
		must(t, m.turn(bare))
		softirq, whole = f.read().Softirq-was.Softirq, time.Duration(m.windows.states.whole-before.whole)
		// The first run on a CPU may reach back to before.
		if most := (time.Since(began) + each) * time.Duration(len(f.states())); softirq > most {
			t.Errorf("%v of softirqs, and %v have passed on all CPUs", softirq, most)
		}
		return softirq-whole >= packets*time.Millisecond/2 // of the millisecond between two packets
	})
	if whole == 0 {
		t.Errorf("nothing of %v in softirqs without interrupts", softirq)
	}
}

// What acts on the accounts gets them without the time of the programs. However long that is, half of each
// packet's time stays.
func TestActedWithoutPrograms(t *testing.T) {
	m := byHand(t)
	f := newFabric(t, m)
	box := f.add("box", 2)
	f.rps(box, "eth0", "1")
	r := f.receive(box, 0, ":9000")
	watch, err := rig.NewStopwatch()
	must(t, err)
	t.Cleanup(func() { must(t, watch.Close()) })
	must(t, watch.Start())
	read := func() (states, time.Duration) {
		t.Helper()
		s, err := m.states()
		must(t, err)
		d, err := watch.Read()
		must(t, err)
		return s, d
	}
	m.windows.excess, m.windows.gaps = float64(time.Second), 1
	must(t, m.Demand(Acted))
	sent := uint64(0)
	testkit.Await(t, "packets that cost less than a stopwatch measures", func() bool { // others' work may interrupt
		was, before := read()
		f.send(f.wire, 1, packets, "udp-send", "10.66.0.2:9000")
		sent += packets
		f.got(r, sent)
		now, measured := read()
		part := float64(now.whole-was.whole) / float64(measured-before)
		t.Logf("%.2f of %v", part, measured-before)
		return part > 0.4 && part < 0.85
	})
}

// A container whose packets begin to take more than Seen of a CPU from another is metered.
func TestRobberMetered(t *testing.T) {
	m := byHand(t)
	m.windows.most = Seen
	f := newFabric(t, m)
	box := f.add("box", 2)
	f.rps(box, "eth0", "1")
	f.receive(box, 1, ":9000")
	f.victim()
	must(t, m.turn(bare))
	began := time.Now()
	f.load(f.host, 1, "udp-send", "--to", "10.66.0.2:9000", "--rate", "20000", "--size", fmt.Sprint(payload))
	for {
		wait := m.next()
		if m.windows.phase == metered {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("phase %d after a minute of theft: %+v", m.windows.phase, m.windows.watch)
		}
		time.Sleep(wait)
	}
	t.Logf("metered after %v", time.Since(began).Round(time.Millisecond))
}
