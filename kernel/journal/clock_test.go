package journal

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"
)

// Setting the clock between two processes does not move an expiry in the file: the time of day
// recorded beside it does not count.
func TestExpiryOverClockStep(t *testing.T) {
	b := newBoard("a", "1")
	dir := t.TempDir()
	j := open(t, dir)
	expiry := time.Now().Add(time.Hour)
	if err := j.TurnUntil(b.knob("a"), "2", Owner{Feature: "test"}, expiry); err != nil {
		t.Fatal(err)
	}
	if e, _ := j.Entry(b.knob("a").Ref(), "test"); e.Expiry != expiry {
		t.Errorf("the expiry is %v, not %v with its monotonic reading", e.Expiry, expiry)
	}
	path := j.store.main.path
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, by := range []time.Duration{-2 * time.Hour, 2 * time.Hour} {
		line := bytes.TrimSpace(bytes.TrimPrefix(data, []byte(header)))
		var r record
		if err := json.Unmarshal(line[bytes.IndexByte(line, ' '):], &r); err != nil {
			t.Fatal(err)
		}
		r.Entry.Expiry = r.Entry.Expiry.Add(by)
		stepped, err := format(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append([]byte(header), stepped...), 0o600); err != nil {
			t.Fatal(err)
		}
		j := open(t, dir)
		// The two clocks are not read in the same nanosecond.
		if e, _ := j.Entry(b.knob("a").Ref(), "test"); e.Expiry.Sub(expiry).Abs() > time.Minute {
			t.Errorf("after a step of %v: %v, want %v", by, e.Expiry, expiry)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
