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
			kill := testkit.Again(t, turnerDir+"="+dir)
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
