package blockio

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/policy"
)

// crowd makes a reservation that no disk can meet, and a neighbour that interferes: a single write
// exceeds so small a capacity.
func (h *host) crowd() (l *testkit.Disk, batch container.Container, cg testkit.CG, hog *load.Board) {
	h.t.Helper()
	l = h.disk(1000)
	_, err := h.Command(h.t.Context(), nil, api.Ask{Body: api.CapacityRequest{Device: l.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 100_000_000, WriteIOPS: 1}}})
	must(h.t, err)
	db, dbCG := h.container("db")
	batch, cg = h.container("batch")
	must(h.t, h.Apply(h.t.Context(), target(h.t, db, "io.reserve: "+l.Path+" riops=50000000")))
	run(h.t, dbCG, "disk", "--to", l.Path, "--size", "4096", "--conns", "16")
	return l, batch, cg, run(h.t, cg, "disk", "--to", l.Path, "--size", "4096", "--conns", "16", "--writes", "100")
}

// decide does what the agent does each second, and returns what is in force then.
func (h *host) decide(t policy.Target) policy.Target {
	h.t.Helper()
	all, err := h.Decide([]policy.Target{t}, true)
	must(h.t, err)
	for i := range all {
		if all[i].Expiry.IsZero() {
			all[i].Expiry = time.Now().Add(time.Hour)
		}
	}
	decided, err := t.With(all, time.Now())
	must(h.t, err)
	h.apply(decided)
	return decided
}

// untilDecided waits until the wanted state is in force.
func (h *host) untilDecided(what string, leave policy.Target, ok func(policy.Target) bool) policy.Target {
	h.t.Helper()
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		decided := h.decide(leave)
		if ok(decided) {
			return decided
		}
		if time.Now().After(end) {
			h.t.Fatalf("%s: not so: %+v, %+v", what, decided.Settings, h.report())
		}
	}
}

// A neighbour that interferes on a disk without weights is capped, and released when policy says so. If
// it has a reservation itself, its cap never goes below that.
func TestCapping(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t)
	l, batch, cg, _ := h.crowd()
	leave := target(t, batch, "io.yield: auto")
	capped := h.untilDecided("it is capped", leave, func(d policy.Target) bool { return len(d.Settings.IO) > 0 })
	io := capped.Settings.IO[0]
	if io.Device != l.Path || io.Max.ReadIOPS != decide.MinCap || io.Max.WriteIOPS < decide.MinCap {
		t.Errorf("decided %+v", io)
	}
	if got, want := throttle(t, cg, l, cgroup.Limits{ReadIOPS: io.Max.ReadIOPS, WriteIOPS: io.Max.WriteIOPS}); got != want {
		t.Errorf("in force is %q, want %q", got, want)
	}
	i := slices.IndexFunc(capped.Origins, func(o policy.Origin) bool { return o.Key == maxKey })
	if i < 0 || !strings.Contains(capped.Origins[i].Reason, `% of the disk while "db" had `) || capped.Origins[i].Since.IsZero() {
		t.Errorf("no evidence: %+v", capped.Origins)
	}

	// The same cap, decided before the agent knew of a larger reservation, and by another name of the
	// disk.
	reserving := target(t, batch, "io.reserve: "+alias(t, l.Path)+" riops=300")
	stale, err := reserving.With([]policy.Decision{{Container: batch.ID, Key: maxKey, Value: l.Path + " riops=20 wiops=20", Expiry: time.Now().Add(time.Hour)}}, time.Now())
	must(t, err)
	h.apply(stale)
	if got, want := throttle(t, cg, l, cgroup.Limits{ReadIOPS: 300, WriteIOPS: 20}); got != want {
		t.Errorf("one that has reserved 300 reads is capped at %q, want %q", got, want)
	}

	// Once it has a reservation, it is left alone.
	h.untilDecided("it is let go", reserving, func(d policy.Target) bool {
		now, _ := throttle(t, cg, l, cgroup.Limits{})
		return now == "" && len(d.Settings.IO) == 1
	})
	testkit.None(t, "left in the journal", h.journal.Entries())
}

// On a disk with weights, the neighbour's weight falls before it is capped.
func TestWeighing(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t)
	l, batch, cg, hog := h.crowd()
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	scheduler := "/sys/block/" + d.Name + "/queue/scheduler"
	must(t, os.WriteFile(scheduler, []byte("bfq"), 0))
	defer func() { must(t, os.WriteFile(scheduler, []byte(d.Scheduler), 0)) }()
	weight := func() (out string) {
		for _, line := range cgroup.IOWeight(cg.IO, cg.IO == cg.V2, 1) {
			out += value(t, line) + " "
		}
		return strings.TrimSuffix(out, " ")
	}
	usual := weight()
	if _, scheduler, _ := strings.Cut(fmt.Sprint(h.report().Devices), "weights by "); !strings.HasPrefix(scheduler, "BFQ") {
		t.Errorf("devices %+v", h.report().Devices)
	}
	leave := target(t, batch, "io.yield: auto", "io.weight: 300")
	first := h.untilDecided("its weight is lowered", leave, func(d policy.Target) bool { return d.Settings.IOWeight == decide.LastWeight || len(d.Settings.IO) > 0 })
	if len(first.Settings.IO) > 0 || strings.Trim(weight(), "1 ") != "" {
		t.Errorf("decided %+v, weight %q", first.Settings, weight())
	}
	h.untilDecided("it is capped", leave, func(d policy.Target) bool { return len(d.Settings.IO) > 0 && d.Settings.IOWeight == decide.LastWeight })

	// A killed agent leaves both, and the next one decides anew.
	hog.SetRate(0)
	must(t, h.Close())
	h.open()
	for _, d := range h.Adopt(h.journal.Entries()) {
		if d.Key != yieldKey {
			t.Errorf("adopted %+v", d)
		}
	}
	h.apply(leave)
	testkit.Same(t, "weight "+weight()+", policy says 300", "", strings.Trim(weight(), "30 "))
	must(t, h.Remove(t.Context(), batch.ID))
	if got := weight(); got != usual || len(h.journal.Entries()) != 0 {
		t.Errorf("after Remove: weight %q, was %q; %+v", got, usual, h.journal.Entries())
	}
}

// A hostile container does not escape: it is the culprit and is held back, even with a nice value of
// -20, in a child cgroup of the largest weight, and with any number of forked tasks.
func TestHostile(t *testing.T) {
	h := newHost(t)
	l := h.disk(100_000_000)
	db, dbCG := h.container("db")
	batch, batchCG := h.container("batch")
	must(t, h.Apply(t.Context(), target(t, db, "io.reserve: "+l.Path+" riops=50000000")))
	run(t, dbCG, "disk", "--to", l.Path, "--size", "4096", "--conns", "16")
	if batchCG.CPU == batchCG.V2 {
		must(t, cgroup.File(batchCG.V2+"/cgroup.subtree_control").Write("+cpu"))
	}
	child := batchCG.Child(t, "mine")
	knob, weights := cgroup.WeightKnob(child.CPU, child.CPU == child.V2)
	must(t, knob.Write(fmt.Sprint(weights.Most)))

	tasks := testkit.Scale(t, 16, 10_000)
	cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("read go; i=0; while [ $i -lt %d ]; do (while :; do :; done) & i=$((i+1)); done; wait", tasks))
	start, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // the rest ends with the cgroup
	child.Add(t, cmd.Process.Pid)
	must(t, unix.Setpriority(unix.PRIO_PROCESS, cmd.Process.Pid, -20))
	var set unix.CPUSet
	set.Set(0)
	must(t, unix.SchedSetaffinity(cmd.Process.Pid, &set))
	_, err = start.Write([]byte("\n"))
	must(t, err)

	leave := target(t, batch, "io.yield: auto")
	yields := func(d policy.Target) bool {
		return d.Settings.IOYield == policy.YieldIdle || d.Settings.IOYield == policy.YieldQuota
	}
	h.untilDecided("it yields", leave, yields)
	must(t, knob.Write(fmt.Sprint(weights.Most))) // the parent decides
	for range 3 {
		time.Sleep(100 * time.Millisecond)
		if d := h.decide(leave); !yields(d) {
			t.Errorf("it yields no more: %+v", h.report())
		}
	}
	testkit.Gives(t, "its cgroup", cgroup.Idled)(weightOf(batchCG).Read())
	if n := len(h.journal.Entries()); n > 2 {
		t.Errorf("%d knobs for one container", n)
	}
	for _, s := range h.standings {
		if s.Culprit != batch.ID && s.Culprit != 0 {
			t.Errorf("the culprit is %v", s.Culprit)
		}
	}
	must(t, h.Remove(t.Context(), batch.ID))
	if v, err := weightOf(batchCG).Read(); err != nil || v == cgroup.Idled || len(h.journal.Entries()) != 0 {
		t.Errorf("after Remove it is %q, %v, with %+v", v, err, h.journal.Entries())
	}
}
