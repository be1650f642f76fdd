package agent

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

// notifier is a feature that sees by itself when something is undone.
type notifier struct {
	*fake
	changed func(container.ID)
}

func (n *notifier) Notify(changed func(container.ID)) { n.changed = changed }

// A feature that sees that something was undone is called at once, also while it is called, and
// what it returns then is the status.
func TestWorkerIsNotified(t *testing.T) {
	c, f := newClock(), &notifier{fake: newFake()}
	var says error
	f.apply = func(context.Context, policy.Target) error { return says }
	w := newWorker(f, c.pace(), quiet(), func() {})
	f.changed(1) // no container is known yet
	w.want(targets(target(1, "isolate"), target(2, "isolate")), false)
	steps(t, w)
	expect(t, f.fake, "apply 1 isolate", "apply 2 isolate")
	says = errors.New("somebody has removed it")
	f.changed(1)
	if did, _ := w.step(t.Context()); !did {
		t.Fatal("it is not called")
	}
	expect(t, f.fake, "apply 1 isolate")
	if got := w.status(1); got.State != api.StateError || got.Error != says.Error() {
		t.Errorf("status %+v", got)
	}
	f.changed(1) // a retry is due in any case
	if did, _ := w.step(t.Context()); did {
		t.Error("the wait after a failure was cut short")
	}
	for range 20 { // each wait after a failure is longer
		c.Advance(w.pace.longest)
		steps(t, w)
	}
	f.took()
	says = nil
	c.Advance(time.Second)
	f.changed(1)
	steps(t, w)
	expect(t, f.fake, "apply 1 isolate")
	c.Advance(w.pace.longest)
	steps(t, w)
	f.took()
	once := true
	f.apply = func(context.Context, policy.Target) error {
		if once {
			once = false
			f.changed(2)
		}
		return nil
	}
	f.changed(2)
	steps(t, w)
	expect(t, f.fake, "apply 2 isolate", "apply 2 isolate")
	if got := w.status(2); got.State != api.StateDone {
		t.Errorf("status %+v", got)
	}
}
