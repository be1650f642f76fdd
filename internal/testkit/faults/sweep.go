package faults

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Rig is a host, and what changes it.
type Rig struct {
	Arg     any           // of Start
	State   func() string // all of the host that the operations may change
	Restore func() error  // undoes what a killed subject has left
	Reset   func() error  // makes the host as at first by force; nil: Restore does
	Adopt   string        // the operation with which a subject has adopted what another left; "": none
	Cheap   bool          // an operation takes milliseconds: other tiers than Full try many calls, too
}

// Case is an operation to sweep.
type Case struct {
	Op   string
	From []string // operations before it, from the host as it is at first
	Undo []string // operations after which the host must be as at first
	// Reads: the operation changes nothing, so any result is right while the host stays.
	Reads bool
	// Later is the operation by which the agent soon does what this one could not, and reported
	// elsewhere.
	Later string
}

// sweep is a sweep under way.
type sweep struct {
	testing.TB
	rig      Rig
	s        *Subject
	clean    string // the host at first
	held     Held   // what a subject holds after a cycle
	findings map[string]int
}

// Sweep does each operation with a fault at each of its calls, and checks:
//   - the subject does not end, and holds no more afterwards than without a fault,
//   - an operation without an error has done its work,
//   - the same operation without a fault then does it,
//   - the operations of Undo bring back the host as it was,
//   - after a kill at that call, Restore does that, and another subject also goes on.
//
// In the tier Full each call gets a fault, and the first of its kind gets all that it can have. Other
// tiers have a few calls of each operation, in each run the same, and the tier Quick has the first three
// operations. Sweep logs how many.
func Sweep(t *testing.T, rig Rig, cases ...Case) {
	t.Helper()
	w := &sweep{TB: t, rig: rig, s: Start(t, rig.Arg), clean: rig.State(), findings: make(map[string]int)}
	if tier(t) == testkit.Quick {
		cases = cases[:min(len(cases), 3)]
	}
	for _, c := range cases { // what is made once, and kept
		w.cycle(c)
	}
	for _, c := range cases {
		t.Run(c.Op, func(*testing.T) { w.sweep(c) }) // -run can choose one
	}
	for _, what := range slices.Sorted(maps.Keys(w.findings)) {
		t.Errorf("%d times: %s", w.findings[what], what)
	}
}

func tier(t testing.TB) testkit.Tier {
	t.Helper()
	tier, err := testkit.ParseTier(os.Getenv(testkit.TierVar))
	testkit.Must(t, err)
	return tier
}

// points returns how many calls of an operation get a fault, and how many are killed; 0: all.
func points(tier testkit.Tier, cheap bool) (faults, kills int) {
	n := map[testkit.Tier][2]int{testkit.Quick: {2, 1}, testkit.CI: {8, 2}}[tier]
	if cheap {
		n[0] *= 10
	}
	return n[0], n[1]
}

// sample returns n of the calls, one of each kind first; n 0: all. It chooses by what they are, so that
// another run, with a call more or less, has the same ones.
func sample(list []Call, n int) []Call {
	if n == 0 || n >= len(list) {
		return list
	}
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Call) int { return cmp.Compare(a.At.hash(), b.At.hash()) })
	turn, of := make(map[Point]int), make(map[string]int)
	for _, c := range list {
		turn[c.At] = of[c.At.Kind]
		of[c.At.Kind]++
	}
	slices.SortStableFunc(list, func(a, b Call) int { return cmp.Compare(turn[a.At], turn[b.At]) })
	return list[:n]
}

func (p Point) hash() int {
	h := fnv.New32a()
	fmt.Fprint(h, p.Kind, p.Nth)
	return int(h.Sum32())
}

func (w *sweep) sweep(c Case) {
	began := time.Now()
	good, out := w.cycle(c)
	w.held = w.s.Look()
	n, kills := points(tier(w), w.rig.Cheap)
	tried, kinds := 0, make(map[string]bool)
	for _, call := range sample(out.Calls, n) {
		at := call.At
		w.try(c, Fault{At: at, Error: at.hash() / 2, Cancel: at.hash()%2 == 1}, good, out.Err)
		tried++
		if n == 0 && !kinds[at.Kind] { // the first of its kind gets all
			for e := range call.Errors {
				w.try(c, Fault{At: at, Error: e}, good, out.Err)
			}
			w.try(c, Fault{At: at, Cancel: true}, good, out.Err)
			tried += len(call.Errors) + 1
		}
		kinds[at.Kind] = true
	}
	killed := 0
	for _, call := range sample(out.Calls, kills) {
		w.kill(c, call.At, good, killed%2 == 1)
		killed++
	}
	w.Logf("%-10s %4d calls, %4d faults tried at %3d kinds of calls, %3d kills, %v", c.Op, len(out.Calls), tried, len(kinds), killed, time.Since(began).Round(time.Millisecond))
}

// cycle does an operation and undoes it, and returns the host in between.
func (w *sweep) cycle(c Case) (good string, out Outcome) {
	w.Helper()
	w.all(c.From)
	out = w.s.Do(c.Op, Fault{})
	if out.Died != "" {
		w.Fatal(out.Died)
	}
	good = w.rig.State()
	w.all(c.Undo)
	if now := w.rig.State(); now != w.clean {
		w.Fatalf("%s, without a fault, is not undone: %s", c.Op, difference(w.clean, now))
	}
	return good, out
}

// repeat does an operation without a fault, as an agent does until it succeeds: the kernel frees the
// bandwidth of a thread that was SCHED_DEADLINE a moment later, say.
func (w *sweep) repeat(op string, ok func(Outcome) bool) (out Outcome) {
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if out = w.s.Do(op, Fault{}); out.Died != "" || ok(out) || time.Now().After(end) {
			return out
		}
	}
}

// all does operations without faults.
func (w *sweep) all(ops []string) {
	w.Helper()
	for _, op := range ops {
		if out := w.repeat(op, func(out Outcome) bool { return out.Err == "" }); out.Died != "" || out.Err != "" {
			w.Fatalf("%s, without a fault: %s%s", op, out.Err, out.Died)
		}
	}
}

// try does an operation with a fault. usual is its error without one.
func (w *sweep) try(c Case, f Fault, good, usual string) {
	w.Helper()
	w.all(c.From)
	out := w.s.Do(c.Op, f)
	if out.Met == nil && out.Died == "" {
		w.all(c.Undo)
		return
	}
	find := func(format string, args ...any) { w.find(c, f, out, fmt.Sprintf(format, args...)) }
	switch {
	case out.Died != "":
		find("the subject ended: %s", out.Died)
		w.again()
		return
	case vanished(out.Errno):
		// The object is there, though the kernel has said otherwise: the host proves nothing.
		for _, op := range append([]string{c.Op}, c.Undo...) {
			if out := w.s.Do(op, Fault{}); out.Died != "" {
				find("%s afterwards: %s", op, out.Died)
				break
			}
		}
		if w.s.cmd.ProcessState != nil || w.rig.State() != w.clean {
			w.again()
		} else {
			w.lookAfter(c, f, find)
		}
		return
	}
	if out.Errno == unix.EINTR && out.Met.own && out.Err != usual {
		find("a signal is no fault, and it reports %q", out.Err)
	}
	now := w.rig.State()
	if now != good && c.Later != "" {
		w.s.Do(c.Later, Fault{})
		now = w.rig.State()
	}
	if now != good && out.Err == usual {
		find("it reports %q, and the host is not as it should be: %s", out.Err, difference(good, now))
	}
	if !c.Reads {
		out := w.repeat(c.Op, func(out Outcome) bool { return out.Err == usual && w.rig.State() == good })
		if now := w.rig.State(); out.Err != usual || now != good || out.Died != "" {
			find("the next one returns %q%s; host: %s", out.Err, out.Died, difference(good, now))
		}
		if out.Died != "" {
			w.again()
			return
		}
	}
	for _, op := range c.Undo {
		if out := w.s.Do(op, Fault{}); out.Err != "" || out.Died != "" {
			find("%s afterwards: %s%s", op, out.Err, out.Died)
		}
	}
	if now = w.rig.State(); now != w.clean {
		find("it is not undone: %s", difference(w.clean, now))
		w.again()
		return
	}
	w.lookAfter(c, f, find)
}

// vanished reports whether an error says that there is no such object.
func vanished(e unix.Errno) bool { return e == unix.ENOENT || e == unix.ENODEV || e == unix.ESRCH }

// lookAfter checks that a fault has left nothing in the subject.
func (w *sweep) lookAfter(c Case, f Fault, find func(string, ...any)) {
	w.Helper()
	if left := w.settled(); left != "" {
		// What is made once, and kept, is made by now.
		w.held = w.s.Look()
		w.all(c.From)
		w.s.Do(c.Op, f)
		w.s.Do(c.Op, Fault{})
		w.all(c.Undo)
		if left := w.settled(); left != "" {
			find("each time it leaves %s", left)
		}
		w.held = w.s.Look()
	}
}

// settled returns what the subject still holds beyond the usual.
func (w *sweep) settled() (left string) {
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if left = w.s.Look().More(w.held); left == "" || time.Now().After(end) {
			return left
		}
	}
}

// kill kills the subject at a call. adopt: another goes on.
func (w *sweep) kill(c Case, at Point, good string, adopt bool) {
	w.Helper()
	w.all(c.From)
	f := Fault{At: at, Kill: true}
	out := w.s.Do(c.Op, f)
	if out.Died == "" {
		w.all(c.Undo)
		return
	}
	if !adopt {
		if err := w.rig.Restore(); err != nil {
			w.find(c, f, out, "restore: "+err.Error())
		}
		if now := w.rig.State(); now != w.clean {
			w.find(c, f, out, "restore leaves "+difference(w.clean, now))
		}
	}
	w.s = Start(w, w.rig.Arg)
	if !adopt {
		return
	}
	w.all(c.From)
	next := w.repeat(c.Op, func(out Outcome) bool { return out.Err == "" })
	if w.rig.Adopt != "" {
		w.all([]string{w.rig.Adopt})
	}
	if now := w.rig.State(); !c.Reads && (next.Err != "" || now != good) {
		w.find(c, f, out, fmt.Sprintf("the next subject's returns %q; host: %s", next.Err, difference(good, now)))
	}
	for _, op := range c.Undo {
		if next := w.s.Do(op, Fault{}); next.Err != "" || next.Died != "" {
			w.find(c, f, out, op+" of the next subject: "+next.Err+next.Died)
		}
	}
	if now := w.rig.State(); now != w.clean {
		w.find(c, f, out, "the next subject does not undo it: "+difference(w.clean, now))
		w.again()
	}
}

// again begins with another subject on a restored host.
func (w *sweep) again() {
	w.Helper()
	w.s.end()
	err := w.rig.Restore()
	if w.rig.Reset != nil && w.rig.State() != w.clean {
		err = w.rig.Reset()
	}
	if now := w.rig.State(); now != w.clean {
		w.Fatalf("the host cannot be restored (%v): %s\nafter %s", err, difference(w.clean, now), strings.Join(slices.Sorted(maps.Keys(w.findings)), "\n"))
	}
	w.s = Start(w, w.rig.Arg)
}

func (w *sweep) find(c Case, f Fault, out Outcome, what string) {
	at := ""
	if out.Met != nil {
		at = out.Met.At.Kind
	}
	with := f.String()
	if out.Errno != 0 {
		with = unix.ErrnoName(out.Errno)
	}
	what = fmt.Sprintf("%s, %s at %s: %s", c.Op, with, at, what)
	if w.findings[what] == 0 {
		w.Logf("finding at its call %d: %s", f.At.Nth, what)
	}
	w.findings[what]++
}

// difference lists the lines that differ.
func difference(want, got string) string {
	if want == got {
		return "as it should be"
	}
	lines := func(s string) []string { return strings.Split(s, "\n") }
	less := func(a, b []string) (out []string) { // each as often as a has it more often
		b = slices.Clone(b)
		for _, line := range a {
			if i := slices.Index(b, line); i >= 0 {
				b = slices.Delete(b, i, i+1)
			} else {
				out = append(out, line)
			}
		}
		return out
	}
	out := ""
	for _, line := range less(lines(want), lines(got)) {
		out += "\n- " + line
	}
	for _, line := range less(lines(got), lines(want)) {
		out += "\n+ " + line
	}
	return out
}
