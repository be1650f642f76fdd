package auto

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/policy"
)

// With a full table of pairs, the accounts are enough to isolate a new robber and to credit a new
// victim.
func TestChooserWithoutPairs(t *testing.T) {
	var autos Chooser
	now := account.Reading{Taken: time.Unix(1_800_000_000, 0)}
	took, robbed := make(map[container.ID]time.Duration), make(map[container.ID]time.Duration)
	second := func(full bool) []Choice {
		if now.Taken = now.Taken.Add(time.Second); full {
			now.Lost++
		}
		took[1] += 200 * ms
		robbed[2] += 200 * ms
		now.Accounts = nil
		for _, id := range []container.ID{1, 2, 3} {
			a := account.Account{Container: id, Took: took[id], Robbed: robbed[id]}
			a.Receive[account.UDP].CPU = took[id]
			now.Accounts = append(now.Accounts, a)
		}
		return autos.Next(now, targets(veths(1), veths(2), veths(3)), true, boxName)
	}
	second(false)
	// The pairs are complete: that they are read a moment later is no theft.
	if got := second(false); got[0].Mode != policy.NetCPUObserve {
		t.Errorf("without a full table: %+v", got)
	}
	got := second(true)
	if got[0].Mode != policy.NetCPUIsolate || !strings.Contains(got[0].Reason, "others, not told apart 20.0 %") {
		t.Errorf("the robber: %+v", got[0])
	}
	for range 3 {
		got = second(true)
	}
	if got[1].Mode != policy.NetCPUCharge || got[2].Mode != policy.NetCPUObserve {
		t.Errorf("the victim and somebody else: %+v", got[1:])
	}
}

// The pairs that exist name their victims; the rest of the time taken counts in proportion to how
// often the CPUs were wanted.
func TestUntold(t *testing.T) {
	a := account.Reading{Taken: time.Unix(1_800_000_000, 0)}
	b := account.Reading{Taken: a.Taken.Add(time.Second), Lost: 1, Accounts: []account.Account{{Container: 1, Took: 400 * ms}}}
	for _, x := range []struct {
		kind account.PartyKind
		cpu  time.Duration
	}{{account.Task, 100 * ms}, {account.Idle, 300 * ms}, {account.Ksoftirqd, 200 * ms}} {
		pair := from(x.kind, 0, 1)
		pair.CPU = x.cpu
		b.Thefts = append(b.Thefts, pair)
	}
	// A quarter of the softirqs interrupted a task: that part of the remaining 100 ms counts, as of
	// ksoftirqd's 200.
	if e := between(a, b).evidence(1, boxName); e.robbed() != (100+25+50)*ms || e.idle != (300+75+150)*ms {
		t.Errorf("%v robbed, %v of idle CPUs: %+v", e.robbed(), e.idle, e)
	}
}
