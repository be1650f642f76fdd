package charge

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestPace runs the search against periods of any phase, with looks that are late now and then.
func TestPace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		begin := time.Now()
		period := time.Duration(rapid.IntRange(5, 1000).Draw(t, "period")) * time.Millisecond
		phase := time.Duration(rapid.Int64Range(0, int64(period)-1).Draw(t, "phase"))
		periods := func(now time.Time) uint64 { return uint64((now.Sub(begin) + period - phase) / period) }
		late := rapid.SliceOfN(rapid.IntRange(0, 3), 5, 5).Draw(t, "late")

		p := pace{period: period}
		now, looks := begin, 0
		for ; !p.known(begin); looks++ {
			if looks > 700 {
				t.Fatalf("not found by %d looks: %+v", looks, p)
			}
			to := now.Add(time.Duration(late[looks%5]) * 20 * time.Microsecond)
			p.saw(now, to, periods(to))
			at := p.search(now)
			if !at.After(now) || at.Sub(now) > period {
				t.Fatalf("the next look is in %v", at.Sub(now))
			}
			if now = at; looks%20 == 0 { // now and then the CPU is busy
				now = now.Add(time.Duration(late[looks/20%5]) * 100 * time.Microsecond)
			}
		}
		for range 3 {
			now = now.Add(period / 3 * 2)
			at := p.next(now)
			since := (at.Sub(begin) - phase) % period
			if wait := at.Sub(now); wait <= 0 || wait > period || since < 0 || since > enough {
				t.Fatalf("next period in %v, %v after it began", wait, since)
			}
			if l := p.late(at); l > since || l < since-enough {
				t.Fatalf("late by %v, was %v", l, since)
			}
		}
	})
}

// A search that is always late ends with the precision that it has.
func TestPaceBusy(t *testing.T) {
	now := time.Now()
	p := pace{period: 100 * time.Millisecond}
	p.saw(now, now, 0)
	p.saw(now.Add(7*time.Millisecond), now.Add(7*time.Millisecond), 1)
	if p.known(now.Add(time.Second)) || !p.known(now.Add(1001*time.Millisecond)) {
		t.Error("7 ms are taken for too good, or for too bad")
	}
}

func TestPaceIdle(t *testing.T) {
	now := time.Now()
	p := pace{period: 100 * time.Millisecond}
	for range 140 {
		p.saw(now, now, 7)
		if p.known(now) || p.idle(now) {
			t.Fatal("something is known of a cgroup that sleeps")
		}
		now = p.search(now)
	}
	for range 20 {
		p.saw(now, now, 7)
		now = p.search(now)
	}
	if !p.idle(now) {
		t.Error("the search goes on for ever")
	}
}
