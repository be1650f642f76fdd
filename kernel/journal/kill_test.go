package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
)

var must = testkit.Must

func TestMain(m *testing.M) {
	if status, ok := faults.Reexec(subject)(os.Args); ok {
		os.Exit(status)
	}
	testkit.Main(m)
}

const knobs = 6

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

func first(i int) string { return fmt.Sprintf("first%03d", i) }

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

// Each call to the kernel fails once, and the process is killed at each.
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
