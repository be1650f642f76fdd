package blockio

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Containers get budgets, and the group above them the sum; their threads are real-time,
// later ones, too. All of it is put back, whoever goes first.
func TestRealtime(t *testing.T) {
	h := newHost(t)
	above := testkit.Cgroup(t)
	if _, err := cgroup.RT(above.CPU).Read(); above.CPU == "" || errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, "no real-time groups of cgroup v1")
	}
	a, pidA := h.group(above, "a")
	b, pidB := h.group(above, "b")
	check := func(when, want string) {
		t.Helper()
		var got []string
		for _, dir := range []string{above.CPU, a.Cgroup.CPU, b.Cgroup.CPU} {
			v, err := cgroup.RT(dir).Read()
			must(t, err)
			got = append(got, v)
		}
		for _, pid := range []int{pidA, pidB} {
			attr, err := unix.SchedGetAttr(pid, 0)
			must(t, err)
			got = append(got, strconv.Itoa(int(attr.Policy)))
		}
		if g := strings.Join(got, " "); g != want {
			t.Errorf("%s: %s, want %s", when, g, want)
		}
	}
	ctx := t.Context()
	must(t, h.Apply(ctx, target(t, a, "io.realtime: 20ms")))
	check("one", "20000 20000 0 2 0")
	must(t, h.Apply(ctx, target(t, b, "io.realtime: 30ms")))
	check("two", "50000 20000 30000 2 2")
	must(t, h.Apply(ctx, target(t, a, "io.realtime: 10ms")))
	check("less", "40000 10000 30000 2 2")
	if err := h.Apply(ctx, target(t, a, "io.realtime: 490ms")); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("more than all may have: %v", err)
	}
	check("refused", "40000 10000 30000 2 2")
	must(t, unix.SchedSetAttr(pidB, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0))
	_, err := h.Decide(nil, true)
	must(t, err)
	check("a thread that is not real-time", "40000 10000 30000 2 2")

	// Another agent goes on with what it finds, before it knows all containers.
	must(t, h.Close())
	h.open()
	must(t, h.Apply(ctx, target(t, a, "io.realtime: 10ms")))
	check("after a restart", "40000 10000 30000 2 2")
	must(t, h.Prune(ctx, func(id container.ID) bool { return id == a.ID }))
	check("b has ended meanwhile", "10000 10000 0 2 0")
	must(t, h.Apply(ctx, target(t, b, "io.realtime: 5ms")))
	must(t, h.Remove(ctx, a.ID))
	check("removed", "5000 0 5000 0 2")
	must(t, h.Apply(ctx, target(t, b, "netcpu: observe")))
	check("not asked for", "0 0 0 0 0")
	if left := h.journal.Entries(); len(left) > 0 {
		t.Errorf("left in the journal: %+v", left)
	}
}

// Turns go on after a panic.
func TestTurnsAgain(t *testing.T) {
	var made atomic.Int64
	var in feature.Loop
	in.Contain(func(turn func()) {
		if made.Add(1) > 2 { // the panic, and a turn while the loop rests
			turn()
		}
	})
	r := &turning{dir: t.TempDir(), on: turnPeriod, stop: make(chan struct{}), done: make(chan struct{})}
	go r.run(&in)
	testkit.AwaitNone(t, func() string {
		if n := made.Load(); n < 3 {
			return fmt.Sprintf("%d turns", n)
		}
		return ""
	})
	r.end()
}
