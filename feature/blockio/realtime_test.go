package blockio

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// realtimeRig is two containers below one group of cgroup v1.
type realtimeRig struct {
	*host
	above  testkit.CG
	a, b   container.Container
	pids   [2]int
	normal string // what a thread is that is not real-time
}

func newRealtime(t *testing.T) *realtimeRig {
	t.Helper()
	r := &realtimeRig{host: newHost(t), above: testkit.Cgroup(t)}
	if _, err := cgroup.RT(r.above.CPU).Read(); r.above.CPU == "" || errors.Is(err, errors.ErrUnsupported) {
		testkit.Skip(t, "no real-time groups of cgroup v1")
	}
	r.a, r.pids[0] = r.group(r.above, "a")
	r.b, r.pids[1] = r.group(r.above, "b")
	r.normal = r.thread(0)
	return r
}

// thread returns how the thread of a container is scheduled.
func (r *realtimeRig) thread(i int) string {
	r.t.Helper()
	th, err := sched.FindTask("/proc", r.pids[i])
	must(r.t, err)
	is, err := sched.Deadline("/proc", th).Read()
	must(r.t, err)
	return is
}

// check compares the budgets of the group above and of the two, and whether their threads are
// real-time.
func (r *realtimeRig) check(when, budgets string, first, second bool) {
	r.t.Helper()
	how := map[bool]string{true: sched.RoundRobin, false: r.normal}
	var got []string
	for _, dir := range []string{r.above.CPU, r.a.Cgroup.CPU, r.b.Cgroup.CPU} {
		v, err := cgroup.RT(dir).Read()
		must(r.t, err)
		got = append(got, v)
	}
	testkit.Same(r.t, when, append(strings.Fields(budgets), how[first], how[second]), append(got, r.thread(0), r.thread(1)))
}

// Containers get budgets, and the group above them the sum; their threads are real-time,
// later ones, too. All of it is put back, whoever goes first.
func TestRealtime(t *testing.T) {
	h := newRealtime(t)
	ctx := t.Context()
	must(t, h.Apply(ctx, target(t, h.a, "io.realtime: 20ms")))
	h.check("one", "20000 20000 0", true, false)
	must(t, h.Apply(ctx, target(t, h.b, "io.realtime: 30ms")))
	h.check("two", "50000 20000 30000", true, true)
	must(t, h.Apply(ctx, target(t, h.a, "io.realtime: 10ms")))
	h.check("less", "40000 10000 30000", true, true)
	testkit.Fails(t, "more than all may", h.Apply(ctx, target(t, h.a, "io.realtime: 490ms")), "at most")
	h.check("refused", "40000 10000 30000", true, true)
	attr := &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}
	_, err := fmt.Sscanf(h.normal, "normal %d", &attr.Nice)
	must(t, errors.Join(err, unix.SchedSetAttr(h.pids[1], attr, 0)))
	_, err = h.Decide(nil, true)
	must(t, err)
	h.check("a thread that is not real-time", "40000 10000 30000", true, true)

	// Another agent goes on with what it finds, before it knows all containers.
	must(t, h.Close())
	h.open()
	must(t, h.Apply(ctx, target(t, h.a, "io.realtime: 10ms")))
	h.check("after a restart", "40000 10000 30000", true, true)
	must(t, h.Prune(ctx, func(id container.ID) bool { return id == h.a.ID }))
	h.check("b has ended meanwhile", "10000 10000 0", true, false)
	must(t, h.Apply(ctx, target(t, h.b, "io.realtime: 5ms")))
	must(t, h.Remove(ctx, h.a.ID))
	h.check("removed", "5000 0 5000", false, true)
	must(t, h.Apply(ctx, target(t, h.b, "netcpu: observe")))
	h.check("not asked for", "0 0 0", false, false)
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
