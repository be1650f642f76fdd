package journal

import (
	"errors"
	"testing"
	"time"
)

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
