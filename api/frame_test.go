package api

import (
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// frames returns two frames ten seconds apart, of the containers 1 to n, named a, b, c and so on.
func frames(n int) (before, after Frame) {
	before.Taken = time.Unix(1_800_000_000, 0)
	after.Taken = before.Taken.Add(10 * time.Second)
	for i := range n {
		c := Container{ID: ID(i + 1), Name: string(rune('a' + i))}
		before.Containers, after.Containers = append(before.Containers, c), append(after.Containers, c)
	}
	return before, after
}

func seconds(s float64) *float64 { return &s }

// accounts puts what netcpu has counted within ten seconds into two frames.
func accounts(before, after *Frame, matrix []NetCPUTheft, list ...NetCPUAccount) {
	before.NetCPU = &NetCPU{Since: time.Unix(1_700_000_000, 0), Taken: before.Taken}
	after.NetCPU = &NetCPU{Since: before.NetCPU.Since, Taken: after.Taken, Matrix: matrix, Accounts: list}
	for _, a := range list { // totals since long ago
		was := NetCPUAccount{Container: a.Container, Tasks: 100}
		if a.WaitedCPUs != nil {
			was.WaitedCPUs = seconds(50)
		}
		before.NetCPU.Accounts = append(before.NetCPU.Accounts, was)
	}
	for i := range list {
		list[i].Tasks += 100
		if list[i].WaitedCPUs != nil {
			list[i].WaitedCPUs = seconds(*list[i].WaitedCPUs + 50)
		}
	}
}

var roughly = cmpopts.EquateApprox(0, 1e-9)

// TestSlowedByPackets: how much slower a container runs, by what the accounts of ten seconds say.
func TestSlowedByPackets(t *testing.T) {
	by := func(s float64) []NetCPUCulprit { return []NetCPUCulprit{{Container: 2, Name: "b", Seconds: s}} }
	for _, c := range []struct {
		name   string
		victim NetCPUAccount
		want   float64
	}{
		{"it computes all the time, alone on its CPU", NetCPUAccount{Tasks: 10, Stolen: 4, StolenBy: by(4), WaitedCPUs: seconds(0), Active: 10}, 0.4},
		{"with a quota of half a CPU", NetCPUAccount{Tasks: 5, Throttled: 5, Stolen: 4, StolenBy: by(4), WaitedCPUs: seconds(5), Active: 10, Quota: 0.5}, 0.8},
		{"two threads", NetCPUAccount{Tasks: 20, Stolen: 5, StolenBy: by(5), WaitedCPUs: seconds(0), Active: 20}, 0.25},
		{"it is idle but for a tenth of the time", NetCPUAccount{Tasks: 1, Stolen: 0.5, StolenBy: by(0.5), WaitedCPUs: seconds(0), Active: 1}, 0.05},
		{"it got back what was taken", NetCPUAccount{Tasks: 9, Stolen: 4, StolenBy: by(4), WaitedCPUs: seconds(1), Active: 10, Quota: 0.9, Ledger: &NetCPULedger{Factor: 1.8}}, 0},
		{"more was stolen than it had, as an estimate may say", NetCPUAccount{Tasks: 4, Throttled: 6, Stolen: 5, StolenBy: by(5), WaitedCPUs: seconds(6), Active: 10, Quota: 0.4}, 1},
		{"its waits are not counted", NetCPUAccount{Tasks: 5, Throttled: 5, Stolen: 4, StolenBy: by(4)}, 0.8},
		{"nothing was stolen", NetCPUAccount{Tasks: 10, WaitedCPUs: seconds(0), Active: 10}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, after := frames(1)
			c.victim.Container = 1
			matrix := []NetCPUTheft{{Kind: VictimTask, Victim: 1, Culprit: 2, CulpritName: "b", Seconds: c.victim.Stolen}, {Kind: VictimIdle, Culprit: 2, Seconds: 3}, {Kind: VictimPeer, Culprit: 2, Seconds: 3}}
			accounts(&before, &after, matrix, c.victim)
			row := after.After(before).Rows[0]
			var want []Slowdown
			if c.want > 0 {
				want = []Slowdown{{SlowedByPackets, c.want, 2, "b"}}
			}
			if math.Abs(row.Slowed-c.want) > 1e-9 || cmp.Diff(want, row.By, roughly) != "" {
				t.Errorf("slowed by %v, %v; want %v by b's packets", row.Slowed, row.By, c.want)
			}
		})
	}
}

// TestSlowedByWaiting: who ran while a container waited for a CPU.
func TestSlowedByWaiting(t *testing.T) {
	before, after := frames(3)
	accounts(&before, &after,
		[]NetCPUTheft{
			{Kind: VictimKsoftirqd, Culprit: 2, CulpritName: "b", Seconds: 2},
			{Kind: VictimKsoftirqd, Culprit: 1, CulpritName: "a", Seconds: 1}, // its own
			{Kind: VictimTask, Victim: 3, Culprit: 2, CulpritName: "b", Seconds: 1},
		},
		NetCPUAccount{Container: 1, Name: "a", Tasks: 5, WaitedCPUs: seconds(5), Active: 10},
		NetCPUAccount{Container: 2, Name: "b", Tasks: 0, WaitedCPUs: seconds(0), Active: 0},
		NetCPUAccount{Container: 3, Name: "c", Tasks: 2, WaitedCPUs: seconds(0), Active: 2})
	row := after.After(before).Rows[0]
	// Of the five seconds that ran meanwhile, three are b's packets, one is a's own, one c's tasks.
	if want := []Slowdown{{SlowedByPackets, 0.3, 2, "b"}, {Cause: SlowedByCPU, Slowed: 0.1}}; row.Name != "a" || cmp.Diff(want, row.By, roughly) != "" || math.Abs(row.Slowed-0.4) > 1e-9 {
		t.Errorf("%s is slowed by %v, %v; want %v", row.Name, row.Slowed, row.By, want)
	}

	// A reservation has the waits watched, with names.
	after.BlockIO = &BlockIO{Waits: []BlockIOWait{
		{Victim: 1, Culprit: 3, Name: "c", Share: 0.3}, {Victim: 1, Name: "(host)", Share: 0.1}, {Victim: 1, Name: "(CPU quota)", Share: 0.5}, {Victim: 1, Culprit: 1, Name: "a", Share: 0.5},
	}}
	row = after.After(before).Rows[0]
	if want := []Slowdown{{SlowedByPackets, 0.3, 2, "b"}, {SlowedByCPU, 0.075, 3, "c"}, {SlowedByCPU, 0.025, 0, "(host)"}}; cmp.Diff(want, row.By, roughly) != "" {
		t.Errorf("slowed by %v; want %v", row.By, want)
	}

	// Who waits for the quota alone loses nothing to others, and neither does who has all of it.
	for name, a := range map[string]NetCPUAccount{
		"quota":     {Container: 1, Tasks: 5, Throttled: 5, Waited: seconds(5), Quota: 0.5},
		"beside":    {Container: 1, Tasks: 5, Waited: seconds(5), Quota: 0.5},
		"throttled": {Container: 1, Tasks: 5, Throttled: 5, Waited: seconds(5)},
	} {
		before, after := frames(1)
		accounts(&before, &after, nil, a)
		if row := after.After(before).Rows[0]; row.Slowed != 0 {
			t.Errorf("%s: slowed by %v, %v", name, row.Slowed, row.By)
		}
	}
}

// TestSlowedOnSeveralCPUs: waits on all CPUs count, as the agent has summed them up.
func TestSlowedOnSeveralCPUs(t *testing.T) {
	for _, c := range []struct {
		name   string
		victim NetCPUAccount
		want   float64
	}{
		{"a thread that moves, and mostly waits for its disk", NetCPUAccount{Tasks: 1, WaitedCPUs: seconds(6), Active: 7}, 0.6},
		{"two CPUs, half of each", NetCPUAccount{Tasks: 10, WaitedCPUs: seconds(10), Active: 10}, 0.5},
		{"threads that are active for a fifth of the time", NetCPUAccount{Tasks: 1, WaitedCPUs: seconds(1), Active: 2}, 0.1},
		{"its own quota", NetCPUAccount{Tasks: 10, WaitedCPUs: seconds(10), Active: 10, Throttled: 10, Quota: 1}, 0},
		{"nothing", NetCPUAccount{Tasks: 10, WaitedCPUs: seconds(0), Active: 10}, 0},
	} {
		before, after := frames(1)
		c.victim.Container = 1
		accounts(&before, &after, nil, c.victim)
		if row := after.After(before).Rows[0]; math.Abs(row.Slowed-c.want) > 1e-9 {
			t.Errorf("%s: slowed by %v, %v; want %v", c.name, row.Slowed, row.By, c.want)
		}
	}
}

// TestNotCharged: nobody is charged with more of a wait than it ran: the rest was the host.
func TestNotCharged(t *testing.T) {
	before, after := frames(2)
	accounts(&before, &after, []NetCPUTheft{{Kind: VictimKsoftirqd, Culprit: 2, CulpritName: "b", Seconds: 0.1}},
		NetCPUAccount{Container: 1, Tasks: 2, WaitedCPUs: seconds(8), Active: 10}, NetCPUAccount{Container: 2, Name: "b"})
	row := after.After(before).Rows[0]
	if want := []Slowdown{{Cause: SlowedByCPU, Slowed: 0.79}, {SlowedByPackets, 0.01, 2, "b"}}; cmp.Diff(want, row.By, roughly) != "" {
		t.Errorf("slowed by %v; want %v", row.By, want)
	}
}

// TestSlowedByUplink: a class below its guarantee with a queue is slowed by the class that is
// furthest above its own.
func TestSlowedByUplink(t *testing.T) {
	class := func(of ID, name string, guaranteed, sent, backlog, drops uint64) TrafficClass {
		return TrafficClass{Container: of, Name: name, Uplink: "eth0", Direction: "egress", Guaranteed: guaranteed, Bytes: sent, BacklogBytes: backlog, Drops: drops}
	}
	for _, c := range []struct {
		name         string
		was, backlog uint64
		drops, sent  uint64
		want         float64
	}{
		{name: "queue at both ends", was: 9, backlog: 9, sent: 75e6, want: 0.4},
		{name: "queue at one end", backlog: 9, sent: 75e6},
		{name: "drops", drops: 1, sent: 75e6, want: 0.4},
		{name: "no queue", sent: 75e6},
		{name: "what it is due", was: 9, backlog: 9, sent: 125e6},
	} {
		before, after := frames(2)
		before.Traffic = &Traffic{Taken: before.Taken, Classes: []TrafficClass{class(1, "a", 100e6, 0, c.was, 0), class(2, "b", 50e6, 0, 0, 0), class(0, "", 50e6, 0, 0, 0)}}
		after.Traffic = &Traffic{Taken: after.Taken, Classes: []TrafficClass{class(1, "a", 100e6, c.sent, c.backlog, c.drops), class(2, "b", 50e6, 120e6, 0, 0), class(0, "", 50e6, 0, 0, 0)}}
		var want []Slowdown
		if c.want > 0 {
			want = []Slowdown{{SlowedByUplink, c.want, 2, "b"}}
		}
		for _, row := range after.After(before).Rows {
			if row.Name != "a" {
				continue
			}
			if cmp.Diff(want, row.By, roughly) != "" || math.Abs(row.Slowed-c.want) > 1e-9 {
				t.Errorf("%s: slowed by %v, %v; want %v", c.name, row.Slowed, row.By, want)
			}
			if row.Egress.Achieved != 8*float64(c.sent)/10 || row.Egress.Due != 100e6 {
				t.Errorf("%s: it sends %+v", c.name, row.Egress)
			}
		}
	}
}

// TestSlowedByNobody: who is alone at an uplink that carries less than it should loses nothing to
// others, and beside one that sends little no more than that.
func TestSlowedByNobody(t *testing.T) {
	for others, want := range map[uint64]float64{0: 0, 25e6: 0.25} {
		before, after := frames(2)
		class := func(of ID, sent uint64) TrafficClass {
			return TrafficClass{Container: of, Name: "b", Uplink: "eth0", Direction: "egress", Guaranteed: 100e6, Bytes: sent, BacklogBytes: 9}
		}
		before.Traffic = &Traffic{Taken: before.Taken, Classes: []TrafficClass{class(1, 0), class(2, 0)}}
		after.Traffic = &Traffic{Taken: after.Taken, Classes: []TrafficClass{class(1, 75e6), class(2, others)}}
		for _, row := range after.After(before).Rows {
			if row.Name == "a" && math.Abs(row.Slowed-want) > 1e-9 {
				t.Errorf("beside %d bytes: slowed by %v, want %v", others, row.Slowed, want)
			}
		}
	}
}

// TestSlowedUndivided: at an uplink that no policy divides, the agent counts the time that is lost.
func TestSlowedUndivided(t *testing.T) {
	before, after := frames(2)
	before.Traffic = &Traffic{Taken: before.Taken, Contended: []TrafficContended{{Container: 1, Uplink: "eth0", Lost: 100}}}
	after.Traffic = &Traffic{Taken: after.Taken, Contended: []TrafficContended{
		{Container: 1, Uplink: "eth0", Lost: 108.5, Culprit: 2, CulpritName: "b"}, {Container: 2, Uplink: "eth0", Lost: 1.5, Culprit: 1, CulpritName: "a"},
	}}
	rows := after.After(before).Rows
	if want := []Slowdown{{SlowedByUplink, 0.85, 2, "b"}}; rows[0].Name != "a" || math.Abs(rows[0].Slowed-0.85) > 1e-9 || cmp.Diff(want, rows[0].By, roughly) != "" {
		t.Errorf("%+v; want %v", rows[0], want)
	}
	if want := []Slowdown{{SlowedByUplink, 0.15, 1, "a"}}; cmp.Diff(want, rows[1].By, roughly) != "" {
		t.Errorf("%+v; want %v", rows[1], want)
	}
	if rows := after.After(after).Rows; rows[0].Slowed != 0 {
		t.Errorf("%+v; want nothing new", rows[0])
	}
}

// TestSlowedByDisk: a missed reservation counts by what is missing, and by CPU where the culprit
// had that.
func TestSlowedByDisk(t *testing.T) {
	missed := BlockIORow{Container: 1, Achieved: BlockIOFigures{ReadIOPS: 300, WriteIOPS: 90}, Reserved: &BlockIOFigures{ReadIOPS: 1000, WriteIOPS: 100}, State: "interference", Culprit: 2, By: "b"}
	less := missed
	less.State = "asks less"
	for _, c := range []struct {
		name  string
		row   BlockIORow
		waits []BlockIOWait
		want  []Slowdown
	}{
		{"disk", missed, nil, []Slowdown{{SlowedByDisk, 0.7, 2, "b"}}},
		{"cpu", missed, []BlockIOWait{{Victim: 1, Culprit: 2, Name: "b", Share: 0.5}}, []Slowdown{{SlowedByCPU, 0.7, 2, "b"}}},
		{"asks less", less, nil, nil},
	} {
		before, after := frames(1)
		after.BlockIO = &BlockIO{Rows: []BlockIORow{c.row}, Waits: c.waits}
		row := after.After(before).Rows[0]
		if cmp.Diff(c.want, row.By, roughly) != "" {
			t.Errorf("%s: slowed by %v; want %v", c.name, row.By, c.want)
		}
		if row.IOPS != 390 || row.Reserved != 1100 {
			t.Errorf("%s: %v of %v IOPS", c.name, row.IOPS, row.Reserved)
		}
	}
}

// TestSlowedTogether: losses at several resources add up to the worst of them, and the same loss
// seen twice is in one element.
func TestSlowedTogether(t *testing.T) {
	var row OverviewRow
	row.add(losses{{SlowedByPackets, 0.3, 2, "b"}, {SlowedByCPU, 0.1, 3, "c"}})
	row.add(losses{{SlowedByDisk, 0.2, 3, "c"}})
	if row.Slowed != 0.4 || math.Abs(losses(row.By).sum()-0.4) > 1e-9 || len(row.By) != 3 {
		t.Errorf("slowed by %v, %v; want 0.4 in all", row.Slowed, row.By)
	}
	row.add(losses{{SlowedByCPU, 0.8, 3, "c"}})
	if row.Slowed != 0.8 || math.Abs(losses(row.By).sum()-0.8) > 1e-9 || len(row.By) != 3 {
		t.Errorf("slowed by %v, %v; want 0.8 in all, by three", row.Slowed, row.By)
	}
	row.add(losses{{SlowedByUplink, 0.9, 0, ""}, {SlowedByUplink, 0.9, 4, "d"}})
	if row.Slowed != 1 || math.Abs(losses(row.By).sum()-1) > 1e-9 {
		t.Errorf("slowed by %v, %v; want 1 at most", row.Slowed, row.By)
	}
}

// TestOverview: the most slowed comes first, and what is in force is named; frames without reports
// claim nothing.
func TestOverview(t *testing.T) {
	before, after := frames(3)
	after.Containers[1].Features = []FeatureStatus{{Feature: "netcpu", State: StateDone, Asked: true}, {Feature: "traffic", State: StateDone}, {Feature: "blockio", State: StatePartly, Asked: true}}
	after.Latency = &Latency{Containers: []LatencyContainer{
		{Container: 2, Direction: "egress", LatencyTimes: LatencyTimes{Added: &LatencyStage{P99: 0.001}}},
		{Container: 2, Direction: "ingress", LatencyTimes: LatencyTimes{Added: &LatencyStage{P99: 0.003}}},
	}}
	o := after.After(before)
	if !o.Since.Equal(before.Taken) || !o.Taken.Equal(after.Taken) || len(o.Rows) != 3 {
		t.Fatalf("the overview is %+v", o)
	}
	want := OverviewRow{Container: 2, Name: "b", Added: 0.003, InForce: []string{"netcpu", "blockio partly"}}
	testkit.Same(t, "row", want, o.Rows[1])
	accounts(&before, &after, nil, NetCPUAccount{Container: 3, Tasks: 5, WaitedCPUs: seconds(5), Active: 10})
	if o := after.After(before); o.Rows[0].Name != "c" || o.Rows[1].Name != "a" {
		t.Errorf("the order is %v", o.Rows)
	}
}

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
