package charge

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The start of periods of any phase is found, by looks that are late now and then, within what one look
// may be late, and from then on it is known. TestChargeSeeksPeriods has a container that sleeps.
func TestPace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		begin := time.Now()
		period := time.Duration(rapid.IntRange(5, 1000).Draw(t, "period")) * time.Millisecond
		phase := time.Duration(rapid.Int64Range(0, int64(period)-1).Draw(t, "phase"))
		late := rapid.SliceOfN(rapid.IntRange(0, 9), 5, 5).Draw(t, "late")
		p, now := pace{period: period}, begin
		for looks := 0; !p.saw(now, uint64((now.Sub(begin)+period-phase)/period)); looks++ {
			now = now.Add(lookEvery + time.Duration(late[looks%5])*50*time.Microsecond)
		}
		took := now.Sub(begin)
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
