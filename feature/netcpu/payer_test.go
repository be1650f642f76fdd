package netcpu

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// The begin of the periods is looked for before there is anything to write, once;
// and again for a write if the container slept meanwhile.
func TestChargeSeeksPeriods(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.add(r.container(), 0))
		p := r.of[webID]
		looks := func() bool {
			next, err := r.write()
			must(t, err)
			return !next.IsZero()
		}
		if !looks() {
			t.Error("nothing is looked for")
		}
		p.pace.began = p.pace.began.Add(-time.Minute)
		for range 2 {
			if looks() {
				t.Error("a container that sleeps is looked at for ever")
			}
		}
		p.want = 40 * ms
		if !looks() || r.read(file) != value {
			t.Errorf("%q is written, and nothing is known of the periods", r.read(file))
		}
		for range maxTries + 1 { // more, and it is written at any moment
			p.pace = pace{period: p.limit.Period, lo: time.Now(), hi: time.Now()}
			if !looks() {
				break
			}
		}
		if got := r.quota(); got != 40*ms {
			t.Errorf("quota of %v once they are known", got)
		}
	})
}

// What the kernel says of who waits gets into the ledger; where it does not say,
// that is no error.
func TestChargeWaits(t *testing.T) {
	forHierarchies(t, func(t *testing.T, r *chargeRig, file, value string) {
		must(t, r.add(r.container(), 0))
		r.free = true
		p := r.of[webID]
		var waited time.Duration
		// rounds in which it uses four fifths of its quota, of which a fifth is stolen
		rounds := func(n int, told bool) time.Duration {
			for range n {
				r.used -= 2 * p.now / 5
				if waited += 40 * ms; told {
					r.file(filepath.Join(r.cfg.layout.V2, "web"), "cpu.pressure",
						fmt.Sprintf("some avg10=0.00 avg60=0.00 avg300=0.00 total=%d\n", waited.Microseconds()))
				}
				r.rounds(1, 0, 16*ms)
			}
			return p.ledger.State().Balance
		}
		if got := rounds(5, false); got != 0 {
			t.Errorf("owed %v, and nobody says that it waits", got)
		}
		if got := rounds(5, true); got < 20*ms {
			t.Errorf("owed %v although it waits", got)
		}
		r.file(filepath.Join(r.cfg.layout.V2, "web"), "cpu.pressure", "nonsense\n")
		// It is told once, and all else goes on.
		for n := range 3 {
			r.n++
			r.used += 2 * p.now
			r.held += 2
			was := p.ledger.State().Credited
			c := r.costs[webID]
			c.credit += 16 * ms
			r.costs[webID] = c
			r.stat()
			r.now = r.now.Add(chargeEvery)
			if err := r.round(r.now); (err != nil) != (n == 0) {
				t.Errorf("round %d with nonsense: %v", n, err)
			}
			if got := p.ledger.State().Credited - was; got != 16*ms {
				t.Errorf("round %d with nonsense: %v booked", n, got)
			}
		}
	})
}
