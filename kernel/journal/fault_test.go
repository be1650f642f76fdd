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
