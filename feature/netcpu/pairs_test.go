package netcpu

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
)

// Whatever happens to pairs, there are never too many, and no series ever goes back, including the
// rest's.
func TestPairs(t *testing.T) {
	const limit, containers = 4, 6
	rnd := rand.New(rand.NewPCG(1, 2))
	var p pairs
	cpu := make(map[account.Pair]time.Duration)
	alive := make(map[container.ID]bool)
	next := container.ID(1)
	type state struct {
		shown map[account.Pair]time.Duration
		other time.Duration
	}
	before := state{}
	for step := range 2000 {
		for id := range alive {
			if rnd.IntN(100) == 0 {
				delete(alive, id)
			}
		}
		for len(alive) < containers {
			alive[next] = true
			next++
		}
		for range 3 {
			// Running containers, the host, and some that have ended.
			v := max(next, containers+2) - 1 - container.ID(rnd.Uint64N(containers+2))
			c := max(next, containers+2) - 1 - container.ID(rnd.Uint64N(containers+2))
			cpu[account.Pair{Victim: account.Party{Container: v, Kind: []account.PartyKind{account.Task, account.Idle}[rnd.IntN(2)]}, Culprit: c}] += time.Duration(rnd.IntN(1000))
		}
		for k := range cpu { // the meter forgets ended containers at some time
			if !alive[k.Culprit] && k.Culprit != 0 && rnd.IntN(50) == 0 {
				delete(cpu, k)
			}
		}
		show, other := p.split(maps.Clone(cpu), limit, func(id container.ID) bool { return id == 0 || alive[id] })
		now := state{make(map[account.Pair]time.Duration), other}
		for _, k := range show {
			now.shown[k] = cpu[k]
		}
		if len(show) > limit || len(now.shown) != len(show) || other < before.other {
			t.Fatalf("step %d: %d shown, other %v after %v", step, len(show), other, before.other)
		}
		for k, d := range before.shown {
			runs := (k.Culprit == 0 || alive[k.Culprit]) && (k.Victim.Container == 0 || alive[k.Victim.Container])
			if is, ok := now.shown[k]; runs && !ok && cpu[k] > 0 || ok && is < d || ok && !runs {
				t.Fatalf("step %d: %+v was %v, is %v (shown %v, runs %v)", step, k, d, is, ok, runs)
			}
		}
		before = now
	}
	if before.other == 0 || len(before.shown) == 0 {
		t.Error(fmt.Sprint("the test tests nothing: ", before))
	}
}
