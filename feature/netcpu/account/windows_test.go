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
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// byHand opens a Meter whose phases the test chooses.
func byHand(t testing.TB) *Meter {
	t.Helper()
	m := counting(t, func(cfg *Config) { cfg.exact, cfg.byHand = seconds(), true })
	m.windows.most = 100 // none
	return m
}

// counting opens a Meter that opens windows.
func counting(t testing.TB, change func(*Config)) *Meter {
	t.Helper()
	testkit.NeedRoot(t)
	cfg := config(t)
	change(&cfg)
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
	return m
}

func attachedPrograms(m *Meter) int {
	return len(m.links) + len(m.windows.ends) + len(m.windows.others)
}

// While a mode acts on the accounts, the programs stay attached, and packets are stamped.
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
	// The programs' own time is unknown. It is measured once, and not while others are robbed.
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

// Interrupts before softirqs are not part of the time that is measured between windows. Even a large
// overhead around an interrupt does not reach back into the previous run, so no CPU is charged more
// than the time that passes.
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

// A mode acts on accounts without the time of the programs. However long that is, half of each packet's
// time stays.
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
		sum, _, err := watch.Read()
		must(t, err)
		return s, sum
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

// Two containers are each charged for the time of their own packets. The packets of each come on a
// separate CPU, so that a stopwatch measures them separately. Prices from windows divide the sum.
func TestTenantsMeasured(t *testing.T) {
	testkit.InFull(t)
	testkit.Later(t)
	watch, err := rig.NewStopwatch()
	must(t, err)
	t.Cleanup(func() { must(t, watch.Close()) })
	must(t, watch.Start()) // before the programs: it measures the same time
	m := counting(t, func(*Config) {})
	for _, c := range []struct {
		tunnel bool
		rates  [2]string
	}{
		{false, [2]string{"3000", "1000"}}, {false, [2]string{"20000", "2000"}}, {false, [2]string{"flood", "2000"}},
		{true, [2]string{"3000", "1000"}}, {true, [2]string{"20000", "2000"}}, {true, [2]string{"flood", "2000"}},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			f := newFabric(t, m)
			f.rps(f.host, "nic0", "0") // packets stay on the CPU of their sender
			add, net := f.add, "10.66.0"
			if c.tunnel {
				overlay := f.overlay()
				add, net = func(name string, n int) *sandbox.Box { return f.inOverlay(overlay, name, n) }, "10.67.0"
			}
			var boxes []*sandbox.Box
			var boards []*load.Board
			for cpu, rate := range c.rates {
				box := add(fmt.Sprint("box", cpu), 2+cpu)
				boards = append(boards, f.receive(box, 1-cpu, ":9000"))
				f.load(f.wire, cpu, "udp-send", "--to", fmt.Sprintf("%s.%d:9000", net, 2+cpu), "--rate", rate, "--size", fmt.Sprint(payload))
				boxes = append(boxes, box)
			}
			read := func() (r Reading, byCPU []time.Duration, received []float64) {
				_, byCPU, err := watch.Read()
				must(t, err)
				for _, b := range boards {
					received = append(received, float64(b.Read().Since(load.Reading{}).Ops))
				}
				return f.read(), byCPU, received
			}
			time.Sleep(3 * time.Second) // prices become known
			was, before, had := read()
			time.Sleep(time.Duration(testkit.Scale(t, 2, 10)) * time.Second)
			now, measured, has := read()
			d := now.Since(was)
			for cpu, box := range boxes {
				took := measured[cpu] - before[cpu]
				for id, byCPU := range d.ByCPU {
					if id != f.ids[box] {
						took -= byCPU[cpu]
					}
				}
				part := float64(d.ByCPU[f.ids[box]][cpu]) / float64(took)
				t.Logf("%s packets/s: %.3f of %v", c.rates[cpu], part, took)
				if part < 0.8 || part > 1.25 {
					t.Errorf("%.2f of a stopwatch's time", part)
				}
				if n := float64(d.Accounts[f.ids[box]].Receive[UDP].Packets); n < 0.95*(has[cpu]-had[cpu]) {
					t.Errorf("%v packets, received %v", n, has[cpu]-had[cpu])
				}
			}
		})
	}
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
