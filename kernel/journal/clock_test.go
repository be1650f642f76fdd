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
	must(t, j.TurnUntil(b.knob("a"), "2", Owner{Feature: "test"}, expiry))
	if e, _ := j.Entry(b.knob("a").Ref(), "test"); e.Expiry != expiry {
		t.Errorf("the expiry is %v, not %v with its monotonic reading", e.Expiry, expiry)
	}
	path := j.store.main.path
	must(t, j.Close())
	data, err := os.ReadFile(path)
	must(t, err)
	for _, by := range []time.Duration{-2 * time.Hour, 2 * time.Hour} {
		line := bytes.TrimSpace(bytes.TrimPrefix(data, []byte(header)))
		var r record
		must(t, json.Unmarshal(line[bytes.IndexByte(line, ' '):], &r))
		r.Entry.Expiry = r.Entry.Expiry.Add(by)
		stepped, err := format(r)
		must(t, err)
		must(t, os.WriteFile(path, append([]byte(header), stepped...), 0o600))
		j := open(t, dir)
		// The two clocks are not read in the same nanosecond.
		if e, _ := j.Entry(b.knob("a").Ref(), "test"); e.Expiry.Sub(expiry).Abs() > time.Minute {
			t.Errorf("after a step of %v: %v, want %v", by, e.Expiry, expiry)
		}
		must(t, j.Close())
	}
}
