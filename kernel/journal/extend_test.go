package journal

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A renewal changes the expiry of what matches, and nothing on the host.
func TestExtend(t *testing.T) {
	b := newBoard("a", "1", "b", "1")
	dir := t.TempDir()
	j := open(t, dir)
	early, late := time.Unix(1_800_000_000, 0).UTC(), time.Unix(1_900_000_000, 0).UTC()
	for name, at := range map[string]time.Time{"a": early, "b": {}} {
		if err := j.TurnUntil(b.knob(name), "2", Owner{Feature: "test"}, at); err != nil {
			t.Fatal(err)
		}
	}
	b.set("a", "by somebody else")
	of := func(name string) func(Entry) bool { return func(e Entry) bool { return e.Ref.Object == name } }
	if err := errors.Join(j.Extend(of("a"), late), j.Extend(of("nothing"), late)); err != nil {
		t.Fatal(err)
	}
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
	if err := j.Extend(nil, time.Time{}); err != nil {
		t.Fatal(err)
	}
	j.Close()
	if err := j.Extend(nil, late); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	j = open(t, dir)
	if diff := cmp.Diff(map[string]time.Time{"a": {}, "b": {}}, expiry(j)); diff != "" {
		t.Error(diff)
	}
}
