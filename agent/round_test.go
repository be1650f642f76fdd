package agent

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/policy"
)

// many stands for the policy of so many containers that it takes a while.
type many struct {
	policies
	resolved atomic.Int64
}

const slow = 20 * time.Millisecond

func (m *many) Resolve(list []container.Container) ([]policy.Target, []policy.Problem) {
	m.resolved.Add(1)
	time.Sleep(slow)
	return m.policies.Resolve(list)
}

// However often containers come and go, rounds leave the agent most of its time, and
// the last change is seen.
func TestRoundsRest(t *testing.T) {
	r := newRig(t)
	synctest.Test(t, func(t *testing.T) {
		set, m := newFakeSet(true), &many{policies: policy.NewStore("", time.Now)}
		a := assemble(Config{StateDir: r.state, Log: quiet()}, set, m, r.journal(), r.host.opener, []feature.Feature{newFake()}, ordinary())
		defer a.journal.Close()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { a.loop(ctx); close(done) }()
		const changes = 10_000
		for n := range changes {
			set.set(true, box(container.ID(n+1), ""))
			time.Sleep(time.Millisecond)
		}
		most := int64(changes * time.Millisecond / ((1 + roundRest) * slow))
		if n := m.resolved.Load(); n > most+1 || n < most/2 {
			t.Errorf("%d rounds in 10 s, want about %d", n, most)
		}
		time.Sleep(time.Second)
		a.mu.Lock()
		_, seen := a.targets[changes]
		a.mu.Unlock()
		if !seen {
			t.Error("the last container is not seen")
		}
		cancel()
		<-done
	})
}
