package api

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestNetCPUAfter(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	at := func(sec int) time.Time { return start.Add(time.Duration(sec) * time.Second) }
	before := NetCPU{
		Since: start, Taken: at(10), Softirq: 4, Thread: 1, Charged: 5, Lost: 2,
		System: NetCPUAccount{Receive: 0.5, Work: []NetCPUWork{{Direction: "receive", Protocol: "other", Seconds: 0.5, Packets: 100, Each: 5e6}}},
		Accounts: []NetCPUAccount{
			{Container: 1, Name: "a", Tasks: 3, Receive: 2, Own: 1, Stolen: 0.5, Taken: 1, Dropped: 10,
				Ledger:   &NetCPULedger{Balance: 1, Factor: 2, Charged: 3, Credited: 4, Forgiven: 5},
				StolenBy: []NetCPUCulprit{{Container: 2, Seconds: 0.25}, {Seconds: 0.25}},
				Work:     []NetCPUWork{{Direction: "receive", Protocol: "udp", Seconds: 2, Packets: 1000, Bytes: 9, Each: 2e6}, {Direction: "send", Protocol: "tcp", Packets: 1}}},
			{Container: 4, Name: "d", Ended: true, Receive: 1, Stolen: 1},
		},
		Matrix: []NetCPUTheft{{Kind: VictimTask, Victim: 1, Culprit: 2, Seconds: 0.25}, {Kind: VictimIdle, Culprit: 2, Seconds: 2}, {Kind: VictimNAPI, Victim: 1, Culprit: 2, Seconds: 7}},
	}
	now := NetCPU{
		Since: start, Taken: at(12), Softirq: 6, Thread: 1.5, Charged: 7.5, Lost: 3,
		System: NetCPUAccount{Receive: 0.5, Work: []NetCPUWork{{Direction: "receive", Protocol: "other", Seconds: 0.5, Packets: 100, Each: 5e6}}},
		Accounts: []NetCPUAccount{
			{Container: 1, Name: "a", Tasks: 4, Throttled: 0.5, Periods: 5, Receive: 2.5, Own: 1.25, Stolen: 1.5, Taken: 1, Dropped: 15,
				Ledger:   &NetCPULedger{Balance: -1, Factor: 0.5, Charged: 3.5, Credited: 4.25, Forgiven: 5},
				StolenBy: []NetCPUCulprit{{Container: 3, Seconds: 0.75}, {Container: 2, Seconds: 0.5}, {Seconds: 0.25}},
				Work:     []NetCPUWork{{Direction: "receive", Protocol: "udp", Seconds: 2.5, Packets: 1500, Bytes: 19, Each: 2e6}, {Direction: "send", Protocol: "tcp", Packets: 1}}},
			{Container: 4, Name: "d", Ended: true, Receive: 1, Stolen: 1},
			{Container: 3, Name: "c", Receive: 0.75, Taken: 0.75, Ledger: &NetCPULedger{Factor: 1, Charged: 0.5}},
		},
		Matrix: []NetCPUTheft{{Kind: VictimIdle, Culprit: 2, Seconds: 2}, {Kind: VictimTask, Victim: 1, Culprit: 2, Seconds: 0.5}, {Kind: VictimTask, Victim: 1, Culprit: 3, Seconds: 0.75}, {Kind: VictimNAPI, Victim: 1, Culprit: 2, Seconds: 7}},
	}
	want := NetCPU{
		Since: at(10), Taken: at(12), Softirq: 2, Thread: 0.5, Charged: 2.5, Lost: 1,
		System: NetCPUAccount{Work: []NetCPUWork{}},
		Accounts: []NetCPUAccount{
			{Container: 3, Name: "c", Receive: 0.75, Taken: 0.75, Ledger: &NetCPULedger{Factor: 1, Charged: 0.5}},
			{Container: 1, Name: "a", Tasks: 1, Throttled: 0.5, Periods: 5, Receive: 0.5, Own: 0.25, Stolen: 1, Dropped: 5,
				Ledger:   &NetCPULedger{Balance: -1, Factor: 0.5, Charged: 0.5, Credited: 0.25},
				StolenBy: []NetCPUCulprit{{Container: 3, Seconds: 0.75}, {Container: 2, Seconds: 0.25}},
				Work:     []NetCPUWork{{Direction: "receive", Protocol: "udp", Seconds: 0.5, Packets: 500, Bytes: 10, Each: 1e6}}},
		},
		Matrix: []NetCPUTheft{{Kind: VictimTask, Victim: 1, Culprit: 3, Seconds: 0.75}, {Kind: VictimTask, Victim: 1, Culprit: 2, Seconds: 0.25}},
	}
	copyOf := now.After(NetCPU{}) // began anew: all of it
	testkit.Same(t, "after another beginning", now, copyOf)
	testkit.Same(t, "after", want, now.After(before))
	testkit.Same(t, "After has changed what it was called on", copyOf, now)

	// A counter that went back has begun anew.
	now.Accounts[0].Receive, now.Lost = 1, 1
	if got := now.After(before); got.Accounts[0].Receive != 1 || got.Lost != 1 {
		t.Errorf("counters that went back give %+v", got)
	}
}
