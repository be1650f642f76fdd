package account

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/sandbox"
)

// Two containers behind one queue, three packets to one, each packet the same
// work: the charges must be as the packets are that the containers have got. Where
// a NAPI polls, the one's cost 5 to 8 % more in some runs of the test, and in
// others nothing: how long the same work takes is known no better. TestUnequal
// has a stopwatch.
func TestShares(t *testing.T) {
	for _, polls := range []bool{false, true} {
		t.Run(fmt.Sprintf("polled %v", polls), func(t *testing.T) {
			f := newFabric(t)
			within := 0.05
			if polls {
				f.polls()
				within = 0.1
			}
			a, b := f.add("a", 2, f.host), f.add("b", 3, f.host)
			// In rows of 100 to a socket, three of which are the one's: the first of a row
			// wakes who waits there, and costs more by that. One sender, so that rows
			// are alike.
			boards := [2][]*load.Board{}
			var to []string
			for i, box := range []*sandbox.Box{a, b} {
				for n := range []int{3, 1}[i] {
					boards[i] = append(boards[i], f.load(box, 0, "udp-recv", "--listen", fmt.Sprintf(":%d", 9000+n)))
					to = append(to, slices.Repeat([]string{fmt.Sprintf("10.66.0.%d:%d", 2+i, 9000+n)}, 100)...)
				}
			}
			f.load(f.wire, 1, "udp-send", "--rate", "16000", "--to", strings.Join(to, ","))
			received := func() (all [2]uint64) {
				for i := range boards {
					for _, b := range boards[i] {
						all[i] += b.Read().Since(load.Reading{}).Ops
					}
				}
				return all
			}
			var got [2]float64
			f.several(func() delta {
				d, was, now := beside(f.lab, untilKnown, received)
				for i := range got {
					got[i] = float64(now[i] - was[i])
				}
				return d
			}, func(d delta) {
				d.addsUp()
				if got[1] < 1000 || got[0] < 2.5*got[1] || got[0] > 3.5*got[1] {
					d.t.Errorf("got %v packets: not the load that was asked for", got)
				}
				wa, wb := d.of(a).Receive[UDP], d.of(b).Receive[UDP]
				all := float64(wa.CPU + wb.CPU)
				for i, w := range []Work{wa, wb} {
					near(d.t, fmt.Sprintf("what %.0f of %v packets cost", got[i], got), w.CPU, time.Duration(got[i]/(got[0]+got[1])*all), within)
					if n := float64(w.Packets); n < 0.95*got[i] || n > 1.05*got[i] {
						d.t.Errorf("charged for %v packets of %v", n, got[i])
					}
				}
			})
		})
	}
}

// Packets that cost more are charged more: each container has what a stopwatch
// has around the softirqs that brought its packets and no others.
func TestUnequal(t *testing.T) {
	for _, c := range []struct {
		name, protocol string
		rates          map[uint64]time.Duration // and how long each is measured: all is looked at, or some
	}{
		{"udp and tcp", "tcp", map[uint64]time.Duration{400: 3 * while, 4000: untilKnown}},
		// Not at 4000: one sender's timers come while the other sends, right before
		// softirqs that they have not brought (README.md, "What is exact, and what is not").
		{"small and fragments", "udp", map[uint64]time.Duration{400: 3 * while}},
	} {
		for rate, length := range c.rates {
			t.Run(fmt.Sprintf("%s %d", c.name, rate), func(t *testing.T) {
				w := newStopwatch(t, true)
				w.start()
				f := newFabric(t)
				// All on CPU 1, but what comes back to the sender.
				f.rps(f.host, "nic0", "0")
				f.rps(f.wire, "wire", "1")
				a, b := f.add("a", 2, f.host), f.add("b", 3, f.host)
				f.load(a, 1, "udp-recv", "--listen", ":9000")
				f.load(b, 1, c.protocol+"-recv", "--listen", ":9000")
				f.load(f.wire, 1, "udp-send", "--size", "64", "--to", "10.66.0.2:9000", "--rate", fmt.Sprint(rate))
				if c.protocol == "tcp" {
					f.trickle("10.66.0.3:9000", rate)
				} else {
					f.load(f.wire, 1, "udp-send", "--size", "8000", "--to", "10.66.0.3:9000", "--rate", fmt.Sprint(rate))
				}
				var ofA, ofB, both time.Duration
				f.several(func() delta {
					d, was, now := beside(f.lab, length, w.read)
					ofA, ofB, both = now.since(was, byWhom+1), now.since(was, byWhom+2), now.since(was, byWhom+3)
					t.Logf("by the stopwatch: %v and %v, and %v in which both had packets", ofA, ofB, both)
					return d
				}, func(d delta) {
					d.addsUp()
					if min(ofA, ofB) < d.total()/10 || both > min(ofA, ofB)/20 {
						d.t.Errorf("%v and %v by the stopwatch, %v of both: nothing was tested", ofA, ofB, both)
					}
					near(d.t, "the first one's", d.of(a).CPU(), ofA+both/2, 0.05)
					near(d.t, "the second one's", d.of(b).CPU(), ofB+both/2, 0.05)
				})
			})
		}
	}
}

// trickle sends pieces of one TCP connection from outside, by CPU 1.
func (f *fabric) trickle(to string, rate uint64) {
	f.t.Helper()
	var c net.Conn
	f.t.Cleanup(func() {
		if c != nil {
			c.Close()
		}
	})
	f.flooding(f.wire, func() (err error) {
		if c == nil {
			if c, err = net.Dial("tcp", to); err != nil {
				return err
			}
		}
		time.Sleep(time.Second/time.Duration(rate) - 200*time.Microsecond)
		var was, one unix.CPUSet
		one.Set(1)
		if err := errors.Join(unix.SchedGetaffinity(0, &was), unix.SchedSetaffinity(0, &one)); err != nil {
			return err
		}
		_, err = c.Write(make([]byte, 1000))
		return errors.Join(err, unix.SchedSetaffinity(0, &was))
	})
}

// The total, as the kernel has it: what the meter says of all softirqs against a
// stopwatch around them.
func TestTotal(t *testing.T) {
	for _, c := range []struct {
		name, rate string
		polls      bool
	}{{"exact", "500", false}, {"flood", "flood", false}, {"exact polled", "500", true}, {"flood polled", "flood", true}} {
		t.Run(c.name, func(t *testing.T) {
			w := newStopwatch(t, false)
			w.start()
			f := newFabric(t)
			if c.polls {
				f.polls()
			}
			f.rps(f.host, "nic0", "0") // calls of the other CPU are in the meter's total, and no softirqs
			box := f.add("box", 2, f.host)
			f.load(box, 0, "udp-recv", "--listen", ":9000")
			f.load(f.wire, 1, "udp-send", "--to", "10.66.0.2:9000", "--size", "64", "--rate", c.rate)
			var packets time.Duration
			f.several(func() delta {
				d, was, now := beside(f.lab, 3*while, w.read)
				packets = now.since(was, netRx, netTx)
				t.Logf("by the stopwatch %v, by the meter %v: %+.2f %%", packets, d.softirq, 100*(float64(d.softirq)/float64(packets)-1))
				return d
			}, func(d delta) {
				d.addsUp()
				near(d.t, "the meter against the stopwatch", d.softirq, packets, 0.02)
			})
		})
	}
}
