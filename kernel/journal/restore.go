package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
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
// compare-and-set: it replaces only a value that we wrote ourselves. It goes on
// after a failure; the error joins those of all outcomes. It abandons a call that
// does not return, and the entry's Outcome is Failed with ErrStuck. Should the
// call return later, the entry is dropped then.
func (j *Journal) Restore(open Opener, match func(Entry) bool) ([]Outcome, error) {
	if j.isClosed() {
		return nil, os.ErrClosed
	}
	list := j.sorted(match)
	slices.Reverse(list)
	out := make([]Outcome, 0, len(list))
	var errs []error
	left := j.patience
	for _, e := range list {
		began := time.Now()
		// Each entry gets some time, however much the others have used.
		o, there := j.restore(open, e.Entry, match, max(left, j.patience/100))
		if errors.Is(o.Err, ErrStuck) {
			left -= time.Since(began)
		}
		if !there {
			continue
		}
		if o.Err != nil {
			o.Err = fmt.Errorf("restore %s %s: %w", e.Ref.Kind, e.Ref.Object, o.Err)
			errs = append(errs, o.Err)
		}
		out = append(out, o)
	}
	return out, errors.Join(errs...)
}

// restore undoes one entry, unless it is no longer there or no longer matches.
func (j *Journal) restore(open Opener, e Entry, match func(Entry) bool, limit time.Duration) (_ Outcome, there bool) {
	leave, err := j.places.enter(e.Ref.place(), limit)
	if err != nil {
		return Outcome{Entry: e, Result: Failed, Err: err}, true
	}
	now, there := j.entry(e.Ref)
	if !there || match != nil && !match(now.Entry) {
		leave()
		return Outcome{}, false
	}
	done := make(chan Outcome, 1)
	go func() {
		defer leave() // not before it has returned
		o := undo(open, now.Entry, j.set)
		if o.Err == nil {
			if err := j.drop(e.Ref); err != nil {
				o.Result, o.Err = Failed, err
			}
		}
		done <- o
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case o := <-done:
		return o, true
	case <-timer.C:
		return Outcome{Entry: now.Entry, Result: Failed, Err: fmt.Errorf("%w: it was made %v ago", ErrStuck, limit)}, true
	}
}

func undo(open Opener, e Entry, set func(Knob, string) error) Outcome {
	result, value, err := compareAndSet(open, e, set)
	switch {
	case errors.Is(err, ErrGone):
		return Outcome{Entry: e, Result: Gone}
	case err != nil:
		return Outcome{Entry: e, Result: Failed, Err: err}
	}
	return Outcome{Entry: e, Result: result, Value: value}
}

func compareAndSet(open Opener, e Entry, set func(Knob, string) error) (Result, string, error) {
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
	case !e.Ours(value) && !unfinished(k, value, e.Before):
		return Foreign, value, nil
	}
	return Restored, value, set(k, e.Before)
}
