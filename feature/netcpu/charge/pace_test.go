package charge

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The start of periods of any phase is found, by looks that are late now and then, within what one look
// may be late, and from then on it is known. No period begins for a container that sleeps: it is written to
// anyway, and searched for again.
func TestPace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		begin := time.Now()
		period := time.Duration(rapid.IntRange(5, 1000).Draw(t, "period")) * time.Millisecond
		phase := time.Duration(rapid.Int64Range(0, int64(period)-1).Draw(t, "phase"))
		late := rapid.SliceOfN(rapid.IntRange(0, 9), 5, 5).Draw(t, "late")
		sleeps := rapid.Bool().Draw(t, "sleeps")
		p, now := pace{period: period}, begin
		for looks := 0; ; looks++ {
			count := uint64((now.Sub(begin) + period - phase) / period)
			if sleeps {
				count = 7
			}
			if p.saw(now, count) {
				break
			}
			now = now.Add(lookEvery + time.Duration(late[looks%5])*100*time.Microsecond)
		}
		took := now.Sub(begin)
		if sleeps {
			if took < 3*period || took > 3*period+2*lookEvery || p != (pace{period: period}) {
				t.Fatalf("searched for %v: %+v", took, p)
			}
			return
		}
		for range 3 {
			since := (now.Sub(begin) - phase) % period
			if now.Sub(begin) > took+3*period || since < 0 || since > 2*lookEvery {
				t.Fatalf("found after %v, %v after a period began", now.Sub(begin), since)
			}
			at := p.next(now.Add(period / 3 * 2))
			if wait := at.Sub(now); wait <= 0 || wait > 2*period {
				t.Fatalf("the next one is in %v", wait)
			}
			now = at
		}
	})
}
