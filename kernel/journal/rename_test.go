package journal

import (
	"errors"
	"os"
	"testing"
)

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
		if b.writes != 4 {
			t.Errorf("%d writes to the host, want those of the turns", b.writes)
		}
		b.set("new/a", "2")
		b.set("c", "two")
		if reopened {
			j.Close()
			if err := j.Rename(nil, nil); !errors.Is(err, os.ErrClosed) {
				t.Errorf("closed: %v", err)
			}
			j = open(t, dir)
		}
		if _, err := j.Restore(b.open, nil); err != nil {
			t.Error(err)
		}
		for name, want := range map[string]string{"new/a": "1", "old/a": "2", "old/b": "1", "new/b": "other", "c": "1"} {
			if got := b.get(name); got != want {
				t.Errorf("reopened %v: %s is %q, want %q", reopened, name, got, want)
			}
		}
		if left := j.Entries(); len(left) != 0 {
			t.Errorf("left: %s", brief(left))
		}
	}
}
