package journal

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
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

func TestRestoreClosesWhatItOpens(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	j := open(t, t.TempDir())
	turn(t, j, b.knob("a"), "2")
	turn(t, j, b.knob("b"), "2")
	closed := 0
	_, err := j.Restore(func(r Ref) (Knob, error) { return closing{b.knob(r.Object), &closed}, nil }, nil)
	if err != nil || closed != 2 {
		t.Errorf("%d knobs were closed, want 2; %v", closed, err)
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
