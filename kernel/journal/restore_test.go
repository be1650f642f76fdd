package journal

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
)

func TestRestoreNewestFirstAndMatch(t *testing.T) {
	b := newBoard("a", "1", "b", "1", "c", "1", "d", "1")
	dir := t.TempDir()
	j := open(t, dir)
	for i, n := range []string{"a", "b", "c", "d"} {
		must(t, j.Turn(b.knob(n), "2", Owner{Feature: "f", Container: uint64(i % 2)}))
	}
	turn(t, j, b.knob("a"), "3") // does not change the position of a
	delete(b.values, "c")
	j.Close()

	j = open(t, dir)
	out, err := j.Restore(b.open, func(e Entry) bool { return e.Owner.Container == 0 })
	if err != nil || results(out) != "c:gone a:restored a:restored" {
		t.Errorf("restore: %q, %v", results(out), err)
	}
	b.set("b", "9")
	out, err = j.Restore(b.open, nil)
	if err != nil || results(out) != "d:restored b:foreign" || out[1].Value != "9" {
		t.Errorf("restore: %q, %v", results(out), err)
	}
	testkit.Same(t, "entries are left: "+brief(j.Entries()), 0, len(j.Entries()))
}

// stepwise is a knob that writes its value letter by letter.
type stepwise struct{ Knob }

func (s stepwise) Unfinished(value, _, target string) bool { return strings.HasPrefix(target, value) }

func TestUnfinishedIsOurs(t *testing.T) {
	b := newBoard("a", "123", "b", "123")
	opener := func(r Ref) (Knob, error) {
		k, err := b.open(r)
		return stepwise{k}, err
	}
	j := open(t, t.TempDir())
	for _, name := range []string{"a", "b"} {
		must(t, j.Turn(stepwise{b.knob(name)}, "9", Owner{Feature: "f"}))
		b.set(name, "12") // killed while it put 123 back
	}
	// Turned again before the interrupted write was finished.
	must(t, j.Turn(stepwise{b.knob("b")}, "8", Owner{Feature: "f"}))
	out, err := j.Restore(opener, nil)
	if err != nil || results(out) != "b:restored a:restored" || b.values["a"] != "123" || b.values["b"] != "123" {
		t.Errorf("restore: %q, %v, %v", results(out), err, b.values)
	}
}

// closing is a knob that its opener has to close.
type closing struct {
	Knob
	closed *int
}

func (c closing) Close() error {
	*c.closed++
	return nil
}

func TestClosesWhatItOpens(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	j := open(t, t.TempDir())
	turn(t, j, b.knob("a"), "2")
	turn(t, j, b.knob("b"), "2")
	closed := 0
	opener := func(r Ref) (Knob, error) { return closing{b.knob(r.Object), &closed}, nil }
	_, _, err := j.Overwritten(opener, nil)
	if err != nil || closed != 2 {
		t.Errorf("Overwritten has closed %d knobs, want 2; %v", closed, err)
	}
	_, err = j.Restore(opener, nil)
	if err != nil || closed != 4 {
		t.Errorf("Restore has closed %d knobs, want 2; %v", closed-2, err)
	}
}

// A knob is left until those of the same device that were turned after it are as they were.
func TestRestoreKeepsTheOrderOfADevice(t *testing.T) {
	b := newBoard("7/2/a", "1", "7/2/b", "1", "7/3/a", "1", "c", "1")
	j := open(t, t.TempDir())
	for _, name := range []string{"c", "7/3/a", "7/2/a", "7/2/b"} {
		turn(t, j, b.knob(name), "2")
	}
	refused := errors.New("refused")
	out, err := j.Restore(func(r Ref) (Knob, error) {
		if r.Object == "7/2/b" {
			return nil, refused
		}
		return b.open(r)
	}, nil)
	if !errors.Is(err, refused) || !errors.Is(err, errLater) || results(out) != "7/2/b:failed 7/2/a:failed 7/3/a:restored c:restored" {
		t.Errorf("restore: %q, %v", results(out), err)
	}
	out, err = j.Restore(b.open, nil)
	if err != nil || results(out) != "7/2/b:restored 7/2/a:restored" {
		t.Errorf("restore: %q, %v", results(out), err)
	}
}

// TurnAll carries out a plan in order, up to the first knob that cannot be turned. Restore undoes
// it.
func TestTurnAll(t *testing.T) {
	b := newBoard("a", "1", "b", "1", "c", "1")
	j := open(t, t.TempDir())
	by, until := Owner{Feature: "test", Container: 7}, time.Unix(1_900_000_000, 0).UTC()
	plan := []Setting{{b.knob("a"), "2"}, {b.knob("b"), "3"}, {b.knob("c"), "4"}}
	if got := plan[1].String(); got != "mem b = 3" {
		t.Errorf("it says %q", got)
	}
	refused := errors.New("refused")
	b.fail["b"] = refused
	if err := j.TurnAll(plan, by, until); !errors.Is(err, refused) || b.get("a") != "2" || b.get("c") != "1" {
		t.Errorf("%v: a is %s, c is %s", err, b.get("a"), b.get("c"))
	}
	delete(b.fail, "b")
	if err := j.TurnAll(plan, by, until); err != nil || b.get("b") != "3" || b.get("c") != "4" {
		t.Errorf("%v: b is %s, c is %s", err, b.get("b"), b.get("c"))
	}
	for _, e := range j.Entries() {
		if e.Owner != by || !e.Expiry.Equal(until) || e.Before != "1" {
			t.Errorf("noted: %+v", e)
		}
	}
	if out, err := j.Restore(b.open, nil); err != nil || len(out) != 3 || b.get("a")+b.get("b")+b.get("c") != "111" {
		t.Errorf("restored: %+v, %v", out, err)
	}
}

var must = testkit.Must

// turnerDir in the environment makes the test binary the process that is killed.
const turnerDir = "FAIRLEAD_JOURNAL_TURNER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(turnerDir); dir != "" {
		fmt.Println(turnForever(dir))
		os.Exit(1)
	}
	if status, ok := faults.Reexec(subject)(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

const (
	knobs   = 6
	foreign = knobs - 1 // the test also changes the value of this knob
)

func fileName(dir string, i int) string { return filepath.Join(dir, fmt.Sprint("knob", i)) }

// pageKnob is a file of 8 bytes that a single write replaces, as in sysfs.
type pageKnob struct{ path string }

func (k pageKnob) Ref() Ref { return Ref{"page", k.path} }

func (k pageKnob) Read() (string, error) {
	b, err := os.ReadFile(k.path)
	return string(b), err
}

func (k pageKnob) Write(v string) error {
	f, err := os.OpenFile(k.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte(v), 0)
	return err
}

func openPage(r Ref) (Knob, error) { return pageKnob{r.Object}, nil }

// turnForever turns each knob once and reports it. Then several features turn knobs up and down
// until the process is killed.
func turnForever(dir string) error {
	j, err := openBoot(filepath.Join(dir, "state"), "", boot)
	if err != nil {
		return err
	}
	for i := range knobs {
		if err := j.Turn(pageKnob{fileName(dir, i)}, "00000000", Owner{"test", uint64(i)}); err != nil {
			return err
		}
	}
	fmt.Println("go")
	r := rand.New(rand.NewPCG(uint64(os.Getpid()), 1))
	for n := 0; ; n++ {
		if r.IntN(20) == 0 {
			if _, err := j.Restore(openPage, func(e Entry) bool { return r.IntN(2) == 0 }); err != nil {
				return err
			}
			continue
		}
		i := r.IntN(knobs)
		value := fmt.Sprintf("%08d", n%50_000_000)
		if r.IntN(4) == 0 {
			value = first(i)
		}
		if err := j.Turn(pageKnob{fileName(dir, i)}, value, Owner{fmt.Sprint("test", r.IntN(2)), uint64(i)}); err != nil {
			return err
		}
	}
}

func first(i int) string { return fmt.Sprintf("first%03d", i) }

func TestKilledAtAnyPoint(t *testing.T) {
	seen := map[Result]int{}
	for round := range 60 {
		dir := t.TempDir()
		for i := range knobs {
			must(t, os.WriteFile(fileName(dir, i), []byte(first(i)), 0o600))
		}
		// Some rounds kill two processes in turn; the second begins with what the first
		// left.
		for range 1 + round%2 {
			_, kill := testkit.Again(t, turnerDir+"="+dir)
			time.Sleep(time.Duration(rand.IntN(8_000)) * time.Microsecond)
			kill()
		}
		edited := round%3 == 0
		if edited {
			must(t, (pageKnob{fileName(dir, foreign)}).Write("someone!"))
		}

		j := open(t, filepath.Join(dir, "state"))
		recorded := map[string]bool{}
		for _, e := range j.Entries() {
			recorded[e.Ref.Object] = true
		}
		out, err := j.Restore(openPage, nil)
		must(t, err)
		for _, o := range out {
			seen[o.Result]++
			if want := edited && o.Entry.Ref.Object == fileName(dir, foreign); (o.Result == Foreign) != want {
				t.Errorf("round %d: %s of %+v, found %q", round, o.Result, o.Entry, o.Value)
			}
		}
		for i := range knobs {
			want := first(i)
			if edited && i == foreign {
				want = "someone!"
			}
			if got, err := (pageKnob{fileName(dir, i)}).Read(); err != nil || got != want {
				t.Errorf("round %d: %s is %q (%v), want %q; was recorded: %v", round, fileName(dir, i), got, err, want, recorded[fileName(dir, i)])
			}
		}
		j.Close()
	}
	t.Log(seen)
	if seen[Restored] == 0 || seen[Foreign] == 0 {
		t.Errorf("the kills did not reach what this is about: %v", seen)
	}
}

// subject turns knobs of a folder.
func subject(arg []byte) (map[string]faults.Op, error) {
	dir := strings.Trim(string(arg), `"`)
	state := filepath.Join(dir, "state")
	j, err := openBoot(state, "", boot)
	if err != nil {
		return nil, err
	}
	return map[string]faults.Op{
		"turn": func(context.Context) error {
			for i := range knobs {
				for value, by := range []string{"one", "two"} { // the latest claim counts
					if err := j.Turn(pageKnob{fileName(dir, i)}, fmt.Sprintf("%08d", value), Owner{by, uint64(i)}); err != nil {
						return err
					}
				}
			}
			return nil
		},
		"release": func(context.Context) error {
			_, err := j.Restore(openPage, func(e Entry) bool { return e.Owner.Feature == "two" })
			return err
		},
		"restore": func(context.Context) error { _, err := j.Restore(openPage, nil); return err },
		"open": func(context.Context) error {
			j.Close()
			next, err := openBoot(state, "", boot)
			if err == nil {
				j = next
			}
			return err
		},
	}, nil
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	testkit.NeedRoot(t)
	dir := t.TempDir()
	for i := range knobs {
		must(t, os.WriteFile(fileName(dir, i), []byte(first(i)), 0o600))
	}
	state := func() string {
		t.Helper()
		var lines []string
		for i := range knobs {
			value, err := pageKnob{fileName(dir, i)}.Read()
			lines = append(lines, fmt.Sprint(i, value, err))
		}
		data, err := os.ReadFile(filepath.Join(dir, "state", prefix+boot))
		if err == nil {
			notes, _, damage := parse(data, clock{})
			lines = append(lines, fmt.Sprint("damage ", damage))
			for _, n := range notes {
				for _, e := range n.entries(nil) {
					lines = append(lines, fmt.Sprint(e.Ref.Object, e.Before, e.Owner, e.Value))
				}
			}
		}
		slices.Sort(lines)
		return strings.Join(lines, "\n")
	}
	restore := func() error {
		j, err := openBoot(filepath.Join(dir, "state"), "", boot)
		if err != nil {
			return err
		}
		_, err = j.Restore(openPage, nil)
		return errors.Join(err, j.Close())
	}
	faults.Sweep(t, faults.Rig{Arg: dir, State: state, Restore: restore, Cheap: true},
		faults.Case{Op: "turn", Undo: []string{"restore"}},
		faults.Case{Op: "release", From: []string{"turn"}, Undo: []string{"restore"}},
		faults.Case{Op: "restore", From: []string{"turn"}},
		faults.Case{Op: "open", From: []string{"turn"}, Undo: []string{"restore"}},
	)
}
