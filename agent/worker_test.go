package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// fataler is what a test and a rapid one have in common.
type fataler interface {
	Helper()
	Fatal(...any)
}

// steps makes all the calls that are due.
func steps(t fataler, w *worker) (next time.Time) {
	t.Helper()
	for range 10_000 {
		did, next := w.step(context.Background())
		if !did {
			return next
		}
	}
	t.Fatal("the worker finds no end")
	return
}

func expect(t *testing.T, f *fake, want ...string) {
	t.Helper()
	if diff := cmp.Diff(strings.Join(want, "\n"), strings.Join(f.took(), "\n")); diff != "" {
		t.Fatalf("calls (-want +got):\n%s", diff)
	}
}

func TestWorkerFollowsTargets(t *testing.T) {
	c, f := newClock(), newFake()
	w := newWorker(f, c.pace(), quiet(), func() {})

	w.want(targets(target(1, "isolate"), target(2, "observe")), false)
	steps(t, w)
	expect(t, f, "apply 1 isolate", "apply 2 observe")

	// The same again is no reason to call.
	w.want(targets(target(1, "isolate"), target(2, "observe")), false)
	steps(t, w)
	expect(t, f)

	w.want(targets(target(1, "observe"), target(3, "isolate")), false)
	steps(t, w)
	expect(t, f, "remove 2", "apply 1 observe", "apply 3 isolate")

	// One that was never applied needs no Remove.
	w.want(targets(target(1, "observe"), target(3, "isolate"), target(4, "isolate")), false)
	w.want(targets(target(1, "observe"), target(3, "isolate")), false)
	steps(t, w)
	expect(t, f)

	if got := w.status(3); got.State != api.StateDone || !got.Since.Equal(c.Now()) {
		t.Errorf("status of 3 is %+v", got)
	}
	if got := w.status(4); got.State != api.StatePending {
		t.Errorf("status of 4 is %+v", got)
	}
}

func TestWorkerRefreshes(t *testing.T) {
	c, f := newClock(), newFake()
	w := newWorker(f, c.pace(), quiet(), func() {})
	w.want(targets(target(1, "isolate")), true)
	next := steps(t, w)
	expect(t, f, "apply 1 isolate", "prune")
	if want := c.Now().Add(w.pace.refresh); !next.Equal(want) {
		t.Fatalf("next call at %v, want %v", next, want)
	}
	c.Advance(w.pace.refresh - 1)
	steps(t, w)
	expect(t, f)
	c.Advance(1)
	steps(t, w)
	expect(t, f, "prune", "apply 1 isolate")
	if got := w.status(1); got.State != api.StateDone || got.Since.Equal(c.Now()) {
		t.Errorf("a refresh is no new state: %+v", got)
	}
}

func TestWorkerBacksOff(t *testing.T) {
	c, f := newClock(), newFake()
	broken := true
	f.apply = func(context.Context, policy.Target) error {
		if broken {
			return errFake
		}
		return nil
	}
	w := newWorker(f, c.pace(), quiet(), func() {})
	w.want(targets(target(1, "isolate")), false)
	wait := w.pace.first
	for try := 1; try <= 20; try++ {
		next := steps(t, w)
		expect(t, f, "apply 1 isolate")
		if got := next.Sub(c.Now()); got != wait {
			t.Fatalf("after try %d it waits %v, want %v", try, got, wait)
		}
		if got := w.status(1); got.State != api.StateError || got.Tries != try || got.Error != errFake.Error() || !got.Next.Equal(next) {
			t.Fatalf("status after try %d: %+v", try, got)
		}
		c.Advance(wait - 1)
		steps(t, w)
		expect(t, f)
		c.Advance(1)
		wait = min(2*wait, w.pace.longest)
	}
	// Another target is tried at once, and with new patience.
	w.want(targets(target(1, "observe")), false)
	steps(t, w)
	expect(t, f, "apply 1 observe")
	if got := w.status(1).Tries; got != 1 {
		t.Errorf("%d tries of the new target, want 1", got)
	}
	broken = false
	c.Advance(w.pace.first)
	steps(t, w)
	if got := w.status(1); got.State != api.StateDone || got.Error != "" {
		t.Errorf("status after success: %+v", got)
	}
}

func TestSpread(t *testing.T) {
	p := ordinary()
	for _, x := range []struct {
		chance float64
		want   time.Duration
	}{{0, 80 * time.Second}, {0.5, 100 * time.Second}, {0.999999, 120 * time.Second}} {
		p.jitter = func() float64 { return x.chance }
		if got := p.spread(100 * time.Second).Round(time.Second); got != x.want {
			t.Errorf("spread at %v is %v, want %v", x.chance, got, x.want)
		}
	}
}

func TestWorkerRemovesUntilItSucceeds(t *testing.T) {
	c, f := newClock(), newFake()
	broken, left := true, 0
	f.remove = func(context.Context, container.ID) error {
		if broken {
			return errFake
		}
		return nil
	}
	w := newWorker(f, c.pace(), quiet(), func() { left++ })
	w.want(targets(target(1, "isolate")), true)
	if w.adopted() {
		t.Error("adopted before it was tried")
	}
	steps(t, w)
	if !w.adopted() || left != 1 {
		t.Errorf("adopted %v, left called %d times", w.adopted(), left)
	}
	left = 0
	w.want(nil, true)
	steps(t, w)
	if !w.has(1) || left != 0 {
		t.Fatal("forgotten although Remove failed")
	}
	// Prune must leave it to Remove.
	if got := f.inForce(); len(got) != 1 {
		t.Fatalf("in force: %v", got)
	}
	broken = false
	c.Advance(w.pace.first)
	steps(t, w)
	if w.has(1) || left != 1 || len(f.inForce()) != 0 {
		t.Fatalf("after Remove: has %v, left called %d times, in force %v", w.has(1), left, f.inForce())
	}
}

// What is new or has ended comes before what failed, however much of that is due.
func TestWorkerUrgency(t *testing.T) {
	c, f := newClock(), newFake()
	f.apply = func(_ context.Context, t policy.Target) error {
		if t.Container.ID < 10 {
			return errFake
		}
		return nil
	}
	w := newWorker(f, c.pace(), quiet(), func() {})
	all := targets(target(20, "isolate"), target(21, "isolate"))
	w.want(all, true)
	steps(t, w)
	for id := container.ID(1); id < 10; id++ {
		all[id] = new(target(id, "isolate"))
	}
	w.want(all, true)
	steps(t, w)
	f.took()
	c.Advance(w.pace.refresh + time.Minute) // all of it is due
	delete(all, 20)
	all[30] = new(target(30, "isolate"))
	w.want(all, true)
	steps(t, w)
	got := f.took()
	want := []string{"remove 20", "apply 30 isolate", "prune"}
	testkit.Same(t, "first calls", want, got[:3])
	if last := got[len(got)-1]; last != "apply 21 isolate" || len(got) != 3+9+1 {
		t.Errorf("%d calls, the last is %q; want the 9 retries and then the refresh of 21", len(got), last)
	}
}

func TestWorkerPrunesOnlyWhenComplete(t *testing.T) {
	c, f := newClock(), newFake()
	f.host[7] = "isolate" // an earlier agent's
	broken := true
	f.prune = func() error {
		if broken {
			return errFake
		}
		return nil
	}
	w := newWorker(f, c.pace(), quiet(), func() {})
	w.want(targets(target(1, "isolate")), false)
	steps(t, w)
	expect(t, f, "apply 1 isolate")
	w.want(targets(target(1, "isolate")), true)
	steps(t, w)
	expect(t, f, "prune")
	testkit.Same(t, "totals tell of prune", errFake.Error(), w.totals().Prune)
	broken = false
	c.Advance(w.pace.first)
	steps(t, w)
	expect(t, f, "prune")
	testkit.Same(t, "in force", map[container.ID]policy.NetCPU{1: "isolate"}, f.inForce())
}

// What is not covered in full is neither done nor failed, and is looked at again.
func TestWorkerPartly(t *testing.T) {
	c, f := newClock(), newFake()
	covered := false
	f.apply = func(context.Context, policy.Target) error {
		if covered {
			return nil
		}
		return fmt.Errorf("netcpu isolate: %w: eth0 does not poll", feature.ErrPartly)
	}
	w := newWorker(f, c.pace(), quiet(), func() {})
	w.want(targets(target(1, "isolate")), false)
	next := steps(t, w)
	testkit.Same(t, "looked at again after", w.pace.longest, next.Sub(c.Now()))
	if got := w.status(1); got.State != api.StatePartly || !strings.Contains(got.Error, "eth0") {
		t.Errorf("status %+v", got)
	}
	if got := w.totals(); got.Partly != 1 || got.Done+got.Failed+got.Pending != 0 {
		t.Errorf("totals %+v", got)
	}
	testkit.Is(t, "a value set by hand would be taken back", w.settle(t.Context(), 1), nil)
	covered = true
	c.Advance(w.pace.longest)
	steps(t, w)
	if got := w.status(1); got.State != api.StateDone || got.Error != "" {
		t.Errorf("status %+v", got)
	}
}

// A label that does not count for its key leaves the container's policy in force in part, of the
// feature that the key is of.
func TestRefusedLabel(t *testing.T) {
	c, f := newClock(), newFake()
	w := newWorker(f, c.pace(), quiet(), func() {})
	mine, other := target(1, "isolate"), target(2, "isolate")
	mine.Refused = []policy.Problem{{Container: 1, Key: "fairlead.netcpu", Reason: "is ignored: say labels: host"}}
	other.Refused = []policy.Problem{{Container: 2, Key: "fairlead.io.realtime", Reason: "is ignored: say labels: host"}}
	w.want(targets(mine, other), false)
	steps(t, w)
	if got := w.status(1); got.State != api.StatePartly || !strings.Contains(got.Error, "fairlead.netcpu: is ignored: say labels: host") {
		t.Errorf("status %+v", got)
	}
	if got := w.status(2); got.State != api.StateDone {
		t.Errorf("of another feature: %+v", got)
	}
	f.apply = func(context.Context, policy.Target) error { return errFake }
	w.want(targets(mine), false)
	mine.Settings.NetCPU = policy.NetCPUCharge
	w.want(targets(mine), false)
	steps(t, w)
	if got := w.status(1); got.State != api.StateError || got.Error != errFake.Error() {
		t.Errorf("status %+v", got)
	}
}

func TestWorkerAppliesAgainWhoSharedANamespace(t *testing.T) {
	c, f := newClock(), newFake()
	w := newWorker(f, c.pace(), quiet(), func() {})
	a, b, other := target(1, "isolate"), target(2, "isolate"), target(3, "isolate")
	a.Container.NetNS, b.Container.NetNS, other.Container.NetNS = 5, 5, 6
	w.want(targets(a, b, other), false)
	steps(t, w)
	f.took()
	w.want(targets(b, other), false)
	steps(t, w)
	expect(t, f, "remove 1", "apply 2 isolate")
}

// Who was refused because of another in its namespace is tried again as soon as that one has been
// changed, and not for what is only refreshed.
func TestWorkerTriesAgainWhoWasInItsWay(t *testing.T) {
	c, f := newClock(), newFake()
	w := newWorker(f, c.pace(), quiet(), func() {})
	a, b, other := target(1, "isolate"), target(2, "observe"), target(3, "charge")
	a.Container.NetNS, b.Container.NetNS, other.Container.NetNS = 5, 5, 6
	f.apply = func(_ context.Context, x policy.Target) error {
		if x.Settings.NetCPU != f.host[2] && x.Container.ID == 1 || x.Container.ID == 3 {
			return feature.ErrDisagree
		}
		return nil
	}
	w.want(targets(a, b, other), false)
	steps(t, w)
	expect(t, f, "apply 1 isolate", "apply 2 observe", "apply 3 charge", "apply 1 isolate")
	b.Settings.NetCPU = "isolate"
	w.want(targets(a, b, other), false)
	steps(t, w)
	expect(t, f, "apply 2 isolate", "apply 1 isolate")
	if got := w.status(1); got.State != api.StateDone {
		t.Errorf("status %+v", got)
	}
}

// A container that ends while it is being applied does not wait for that.
func TestWorkerCutsShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.apply = func(ctx context.Context, _ policy.Target) error {
			<-ctx.Done()
			return ctx.Err()
		}
		p := ordinary()
		w := newWorker(f, p, quiet(), func() {})
		stop := testkit.Background(t, func(ctx context.Context) error { w.run(ctx); return nil })

		began := time.Now()
		w.want(targets(target(1, "isolate")), false)
		synctest.Wait() // it hangs in Apply now
		w.want(nil, false)
		synctest.Wait()
		if took := time.Since(began); took != 0 || w.has(1) || len(f.inForce()) != 0 {
			t.Errorf("after %v: has %v, in force %v", took, w.has(1), f.inForce())
		}

		// Only its own time limit ends this one.
		w.want(targets(target(2, "isolate")), false)
		time.Sleep(p.call - 1)
		if got := w.status(2); got.State != api.StatePending {
			t.Errorf("status during the call %+v", got)
		}
		time.Sleep(2 * time.Nanosecond)
		if got := w.status(2); got.State != api.StateError || got.Error != "it took too long" {
			t.Errorf("status after the call %+v", got)
		}
		stop()
		if err := w.stop(context.Background()); err != nil || len(f.inForce()) != 0 || !f.closed {
			t.Errorf("stop: %v, in force %v, closed %v", err, f.inForce(), f.closed)
		}
	})
}

func TestWorkerStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.remove = func(_ context.Context, id container.ID) error {
			if id == 2 {
				return errFake
			}
			return nil
		}
		w := newWorker(f, ordinary(), quiet(), func() {})
		w.want(targets(target(1, "isolate"), target(2, "isolate"), target(3, "isolate")), true)
		steps(t, w)
		f.took()
		testkit.Must(t, w.stop(t.Context()))
		// 2 is given up after some tries: the journal has it.
		expect(t, f, "remove 1", "remove 2", "remove 3", "remove 2", "remove 2", "close")
		// A round that was under way must not bring anything back.
		w.want(targets(target(4, "isolate")), true)
		if w.has(4) {
			t.Error("something is wanted after stop")
		}
	})
}

func TestWorkerLetGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.remove = func(_ context.Context, id container.ID) error {
			time.Sleep(time.Second)
			if id == 2 {
				return errors.New("no")
			}
			return nil
		}
		w := newWorker(f, ordinary(), quiet(), func() {})
		w.want(targets(target(1, "isolate"), target(2, "isolate"), target(3, "isolate")), true)
		steps(t, w)
		w.want(targets(target(3, "isolate")), true)
		stop := testkit.Background(t, func(ctx context.Context) error { w.run(ctx); return nil })
		began := time.Now()
		w.letGo(t.Context(), func(container.ID) bool { return true })
		if took := time.Since(began); took != 2*time.Second || w.has(1) || !w.has(2) || !w.has(3) {
			t.Errorf("after %v: has 1 %v, 2 %v, 3 %v", took, w.has(1), w.has(2), w.has(3))
		}
		stop()
	})
}

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
