package api

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestHistory adds overviews of five seconds each: a container is slowed, recovers, is slowed again
// by another one, and nothing is recorded for a while in the middle of that.
func TestHistory(t *testing.T) {
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	var h History
	add := func(from, to int, slowed float64, by ...Slowdown) {
		h.Add(Overview{Since: at(from), Taken: at(to), Rows: []OverviewRow{
			{Container: 1, Name: "victim", Slowed: slowed, By: by}, {Container: 2, Name: "culprit"},
		}})
	}
	add(0, 5, 0)
	add(5, 10, 0.2, Slowdown{Cause: SlowedByPackets, Culprit: 2, Name: "culprit", Slowed: 0.2})
	add(10, 15, 0.4, Slowdown{Cause: SlowedByPackets, Culprit: 2, Name: "culprit", Slowed: 0.1}, Slowdown{Cause: SlowedByDisk, Slowed: 0.3})
	add(15, 20, 0.01, Slowdown{Cause: SlowedByCPU, Slowed: 0.01})
	add(20, 25, 0.1, Slowdown{Cause: SlowedByPackets, Culprit: 3, Name: "another", Slowed: 0.1})
	add(100, 105, 0.1, Slowdown{Cause: SlowedByPackets, Culprit: 3, Name: "another", Slowed: 0.1})
	want := History{
		Since: at(0), Taken: at(105), Seconds: 30,
		Rows: []HistoryRow{
			{Container: 1, Name: "victim", Seconds: 30, Slowed: 4.05 / 30, Lost: 4.05, Worst: 0.4, WorstAt: at(15), By: []HistoryBlame{
				{Cause: SlowedByPackets, Culprit: 2, Name: "culprit", Lost: 1.5}, {Cause: SlowedByDisk, Lost: 1.5},
				{Cause: SlowedByPackets, Culprit: 3, Name: "another", Lost: 1}, {Cause: SlowedByCPU, Lost: 0.05},
			}},
			{Container: 2, Name: "culprit", Seconds: 30},
		},
		Moments: []HistoryMoment{
			{Since: at(5), Taken: at(15), Container: 1, Name: "victim", Slowed: 0.3, Worst: 0.4, Lost: 3, By: []HistoryBlame{
				{Cause: SlowedByPackets, Culprit: 2, Name: "culprit", Lost: 1.5}, {Cause: SlowedByDisk, Lost: 1.5},
			}},
			{Since: at(20), Taken: at(25), Container: 1, Name: "victim", Slowed: 0.1, Worst: 0.1, Lost: 0.5, By: []HistoryBlame{{Cause: SlowedByPackets, Culprit: 3, Name: "another", Lost: 0.5}}},
			{Since: at(100), Taken: at(105), Container: 1, Name: "victim", Slowed: 0.1, Worst: 0.1, Lost: 0.5, By: []HistoryBlame{{Cause: SlowedByPackets, Culprit: 3, Name: "another", Lost: 0.5}}},
		},
	}
	testkit.Same(t, "history", want, h.Finish(), cmpopts.IgnoreUnexported(History{}), cmpopts.EquateApprox(0, 1e-9))

	var most History // of very many moments the worst are kept
	for i := range 3 * maxMoments {
		most.Add(Overview{Since: at(10 * i), Taken: at(10*i + 5), Rows: []OverviewRow{{Container: 1, Slowed: 0.06 + float64(i)/1e3}}})
	}
	if got := most.Finish().Moments; len(got) != maxMoments || !got[0].Since.Equal(at(10*(3*maxMoments-1))) {
		t.Errorf("%d moments, the first at %v", len(got), got[0].Since)
	}
}

// TestHistoryGaps checks that frames far apart, and a clock that was set back, count for nothing.
func TestHistoryGaps(t *testing.T) {
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	frame := func(s int) Frame {
		return Frame{Taken: start.Add(time.Duration(s) * time.Second), Containers: []Container{{ID: 1}}}
	}
	var h History
	h.AddFrames(frame(0), frame(5))
	h.AddFrames(frame(5), frame(5000))
	h.AddFrames(frame(5000), frame(10))
	h.AddFrames(frame(10), frame(15))
	if got := h.Finish(); got.Seconds != 10 {
		t.Errorf("%v s count", got.Seconds)
	}
}
