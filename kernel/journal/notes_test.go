package journal

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/google/go-cmp/cmp"
)

// A panic that passes through the Journal breaks it, so that nobody goes on with it.
func TestPanicBreaks(t *testing.T) {
	torn := func(Entry) bool { panic("torn") }
	for name, call := range map[string]func(*Journal, *board){
		"extend":  func(j *Journal, _ *board) { j.Extend(torn, time.Time{}) },
		"rename":  func(j *Journal, _ *board) { j.Rename(torn, func(e Entry) Entry { return e }) },
		"restore": func(j *Journal, b *board) { j.Restore(b.open, torn) },
		"turn":    func(j *Journal, _ *board) { j.Turn(tornKnob{}, "x", Owner{Feature: "f"}) },
	} {
		b := newBoard("a", "1")
		j := open(t, t.TempDir())
		turn(t, j, b.knob("a"), "2")
		if j.Entries(); j.Broken() {
			t.Errorf("%s: it is broken before", name)
		}
		func() {
			defer func() {
				if p := recover(); p != "torn" || !j.Broken() {
					t.Errorf("%s: it panics with %v, and is broken: %v", name, p, j.Broken())
				}
			}()
			call(j, b)
		}()
	}
}

// tornKnob panics when it is read.
type tornKnob struct{}

func (tornKnob) Ref() Ref              { return Ref{Kind: "mem", Object: "torn"} }
func (tornKnob) Read() (string, error) { panic("torn") }
func (tornKnob) Write(string) error    { return nil }

// Extend changes the expiry of the entries that match, and nothing on the host.
func TestExtend(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	dir := t.TempDir()
	j := open(t, dir)
	early, late := time.Unix(1_800_000_000, 0).UTC(), time.Unix(1_900_000_000, 0).UTC()
	for name, at := range map[string]time.Time{"a": early, "b": {}} {
		must(t, j.TurnUntil(b.knob(name), "2", Owner{Feature: "test"}, at))
	}
	b.set("a", "by somebody else")
	of := func(name string) func(Entry) bool { return func(e Entry) bool { return e.Ref.Object == name } }
	must(t, errors.Join(j.Extend(of("a"), late), j.Extend(of("nothing"), late)))
	expiry := func(j *Journal) map[string]time.Time {
		out := make(map[string]time.Time)
		for _, e := range j.Entries() {
			out[e.Ref.Object] = e.Expiry
		}
		return out
	}
	if diff := cmp.Diff(map[string]time.Time{"a": late, "b": {}}, expiry(j)); diff != "" || b.get("a") != "by somebody else" {
		t.Errorf("a is %q; expiries:\n%s", b.get("a"), diff)
	}
	must(t, j.Extend(nil, time.Time{}))
	j.Close()
	j = open(t, dir)
	testkit.Same(t, "expiry", map[string]time.Time{"a": {}, "b": {}}, expiry(j))
}

// A reassigned entry belongs to its new owner, also after the journal was closed and opened again.
// It is undone like any other.
func TestReassign(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	dir := t.TempDir()
	j := open(t, dir)
	j.Attribute(func(id uint64) string { return map[uint64]string{1: "first", 2: "second"}[id] })
	for name, id := range map[string]uint64{"a": 1, "b": 3} {
		must(t, j.Turn(b.knob(name), "2", Owner{Feature: "test", Container: id}))
	}
	of := func(id uint64) func(Entry) bool { return func(e Entry) bool { return e.Owner.Container == id } }
	want := map[string]string{"a": "2 second", "b": "3 "}
	owners := func(j *Journal) map[string]string {
		out := make(map[string]string)
		for _, e := range j.Entries() {
			out[e.Ref.Object] = fmt.Sprintf("%d %s", e.Owner.Container, e.Source)
		}
		return out
	}
	for range 2 {
		must(t, j.Reassign(of(1), Owner{Feature: "test", Container: 2}))
		if diff := cmp.Diff(want, owners(j)); diff != "" || b.get("a") != "2" {
			t.Errorf("a is %q; owners:\n%s", b.get("a"), diff)
		}
	}
	testkit.Fails(t, "an owner that the file cannot hold", j.Reassign(of(2), Owner{Feature: "\xff"}))
	j.Close()
	j = open(t, dir)
	testkit.Same(t, "owners", want, owners(j))
	if _, err := j.Restore(b.open, of(2)); err != nil || b.get("a") != "1" || b.get("b") != "2" {
		t.Errorf("restored: %v, a is %q, b %q", err, b.get("a"), b.get("b"))
	}
}

// The last container of a feature to turn a shared knob is its owner, even if the turn writes
// nothing. Another feature has a claim of its own on the knob.
func TestTurnTakesOver(t *testing.T) {
	b := newBoard("a", "1")
	dir := t.TempDir()
	j := open(t, dir)
	j.Attribute(func(id uint64) string { return fmt.Sprint("source ", id) })
	for _, step := range []struct {
		by, want Owner
		source   string
	}{
		{Owner{"one", 1}, Owner{"one", 1}, "source 1"},
		{Owner{"one", 2}, Owner{"one", 2}, "source 2"},
		{Owner{"other", 3}, Owner{"one", 2}, "source 2"},
		{Owner{"one", 0}, Owner{"one", 0}, ""},
	} {
		must(t, j.Turn(b.knob("a"), "2", step.by))
		for _, e := range j.Entries()[:1] {
			if e.Owner != step.want || e.Source != step.source || e.Before != "1" || e.Wrote != "2" {
				t.Errorf("by %+v: %+v", step.by, e)
			}
		}
	}
	testkit.Same(t, "writes", 1, b.writes)
	j.Close()
	j = open(t, dir)
	if list := j.Entries(); len(list) != 2 || list[0].Owner != (Owner{"one", 0}) || list[1].Owner != (Owner{"other", 3}) {
		t.Errorf("reopened: %+v", list)
	}
}

// After Rename, this agent and the next restore a change under the object's new name.
func TestRename(t *testing.T) {
	for _, reopened := range []bool{false, true} {
		b := newBoard("old/a", "1", "old/b", "1", "new/b", "other", "c", "1")
		dir := t.TempDir()
		j := open(t, dir)
		for _, name := range []string{"old/a", "old/b", "new/b", "c"} {
			turn(t, j, b.knob(name), "2")
		}
		err := j.Rename(func(e Entry) bool { return e.Ref.Object != "new/b" }, func(e Entry) Entry {
			switch e.Ref.Object {
			case "c":
				e.Wrote = "two" // also under another name
			default:
				e.Ref.Object = "new/" + e.Ref.Object[len("old/"):]
			}
			return e
		})
		if want := "rename mem old/b to new/b: there is an entry of that name"; err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
		testkit.Same(t, "writes to the host", 4, b.writes)
		b.set("new/a", "2")
		b.set("c", "two")
		if reopened {
			j.Close()
			j = open(t, dir)
		}
		testkit.Check(t, testkit.Err(j.Restore(b.open, nil)))
		for name, want := range map[string]string{"new/a": "1", "old/a": "2", "old/b": "1", "new/b": "other", "c": "1"} {
			testkit.Same(t, fmt.Sprintf("reopened %v: %s", reopened, name), want, b.get(name))
		}
		testkit.None(t, "left", j.Entries())
	}
}
