package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// Result is what became of one entry in Restore.
type Result string

// The results of Restore. All but Failed drop the entry from the journal.
const (
	Restored  Result = "restored"  // Before was written
	Unchanged Result = "unchanged" // Before was there already
	Gone      Result = "gone"      // the object no longer exists
	Foreign   Result = "foreign"   // someone else has changed the value: left alone
	Failed    Result = "failed"    // see Err; the entry is kept for another try
)

// Outcome tells what Restore did with one entry.
type Outcome struct {
	Entry  Entry  `json:"entry"`
	Result Result `json:"result"`
	Value  string `json:"value,omitempty"` // what Restore found; "" for Gone and Failed
	Err    error  `json:"-"`               // for Failed
}

// Restore undoes the entries that match (nil: all), the newest first, by
// compare-and-set: only a value that we wrote ourselves is replaced. It goes on
// after a failure; the error joins those of all outcomes.
func (j *Journal) Restore(open Opener, match func(Entry) bool) ([]Outcome, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, os.ErrClosed
	}
	list := j.sorted(match)
	slices.Reverse(list)
	out := make([]Outcome, 0, len(list))
	var errs []error
	for _, e := range list {
		o := undo(open, e.Entry)
		if o.Err == nil {
			if err := j.drop(e); err != nil {
				o.Result, o.Err = Failed, err
			}
		}
		if o.Err != nil {
			o.Err = fmt.Errorf("restore %s %s: %w", e.Ref.Kind, e.Ref.Object, o.Err)
			errs = append(errs, o.Err)
		}
		out = append(out, o)
	}
	return out, errors.Join(errs...)
}

func undo(open Opener, e Entry) Outcome {
	result, value, err := compareAndSet(open, e)
	switch {
	case errors.Is(err, ErrGone):
		return Outcome{Entry: e, Result: Gone}
	case err != nil:
		return Outcome{Entry: e, Result: Failed, Err: err}
	}
	return Outcome{Entry: e, Result: result, Value: value}
}

func compareAndSet(open Opener, e Entry) (Result, string, error) {
	k, err := open(e.Ref)
	if err != nil {
		return Failed, "", err
	}
	if c, ok := k.(io.Closer); ok {
		defer c.Close()
	}
	value, err := k.Read()
	switch {
	case err != nil:
		return Failed, "", err
	case value == e.Before:
		return Unchanged, value, nil
	case !e.ours(value) && !unfinished(k, value, e.Before):
		return Foreign, value, nil
	}
	return Restored, value, k.Write(e.Before)
}
