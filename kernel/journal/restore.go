package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// Result is what Restore did with one entry.
type Result string

// The results of Restore. All but Failed drop the entry from the journal.
const (
	Released  Result = "released"  // the result of the other claims is in force
	Restored  Result = "restored"  // Before was written
	Unchanged Result = "unchanged" // Before was there already
	Gone      Result = "gone"      // the object no longer exists
	Foreign   Result = "foreign"   // another program has changed the value: left alone
	Failed    Result = "failed"    // see Err; the entry is kept for another attempt
)

// Outcome is the result of Restore for one entry.
type Outcome struct {
	Entry  Entry  `json:"entry"`
	Result Result `json:"result"`
	Value  string `json:"value,omitempty"` // what Restore found; "" for Gone and Failed
	Err    error  `json:"-"`               // for Failed
}

// errLater is the reason why an older knob is not undone yet.
var errLater = errors.New("a later change of the same device is not undone yet")

// Restore undoes the matching entries (nil: all), the newest knobs first. It compares before it sets:
// it replaces only a value that fairlead wrote, by the result of the remaining claims, or by Before
// if none remain. After a failure it continues, but not with the older knobs of the same device: with
// generic receive offload a veth loses its NAPI contexts, and the kernel then refuses to change
// whether threads poll them. The error joins those of all outcomes. Restore abandons a call that
// hangs, with ErrStuck in the entry's Outcome. If the call returns later, the entry is dropped then.
func (j *Journal) Restore(open Opener, match func(Entry) bool) ([]Outcome, error) {
	defer j.intact()
	if j.isClosed() {
		return nil, os.ErrClosed
	}
	list := j.sorted(match)
	slices.Reverse(list)
	out := make([]Outcome, 0, len(list))
	var errs []error
	left := j.patience
	failed := make(map[string]bool) // by device
	for _, e := range list {
		began := time.Now()
		if failed[e.Ref.device()] {
			n, _ := j.note(e.Ref)
			err := fmt.Errorf("restore %s %s: %w", e.Ref.Kind, e.Ref.Object, errLater)
			out, errs = append(out, outcomes(n.entries(match), Failed, "", err)...), append(errs, err)
			continue
		}
		// Each knob gets some time, even if others have used up the rest.
		tried := j.restore(open, e.Ref, match, max(left, j.patience/100))
		if len(tried) > 0 && errors.Is(tried[0].Err, ErrStuck) {
			left -= time.Since(began)
		}
		for i := range tried {
			if o := &tried[i]; o.Err != nil {
				o.Err = fmt.Errorf("restore %s %s: %w", e.Ref.Kind, e.Ref.Object, o.Err)
				errs = append(errs, o.Err)
				failed[e.Ref.device()] = e.Ref.device() != ""
			}
		}
		out = append(out, tried...)
	}
	return out, errors.Join(errs...)
}

// restore withdraws the matching claims on one knob, and returns an Outcome for each. It returns
// none if the claims have gone meanwhile.
func (j *Journal) restore(open Opener, ref Ref, match func(Entry) bool, limit time.Duration) []Outcome {
	failed := func(err error) []Outcome {
		n, _ := j.note(ref)
		return outcomes(n.entries(match), Failed, "", err)
	}
	leave, err := j.places.enter(ref.place(), limit)
	if err != nil {
		return failed(err)
	}
	n, _ := j.note(ref)
	mine := n.entries(match)
	if len(mine) == 0 {
		leave()
		return nil
	}
	done := make(chan []Outcome, 1)
	go func() {
		defer leave() // only after the call has returned
		result, value, err := j.release(open, n, n.without(match))
		if errors.Is(err, ErrGone) {
			result, value, err = Gone, "", j.drop(ref)
		}
		if err != nil {
			result, value = Failed, ""
		}
		done <- outcomes(mine, result, value, err)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case out := <-done:
		return out
	case <-timer.C:
		return failed(fmt.Errorf("%w: it was made %v ago", ErrStuck, limit))
	}
}

func outcomes(of []Entry, result Result, value string, err error) (out []Outcome) {
	for _, e := range of {
		out = append(out, Outcome{Entry: e, Result: result, Value: value, Err: err})
	}
	return out
}

// release reduces the claims on a knob to left.
func (j *Journal) release(open Opener, n note, left []claim) (Result, string, error) {
	k, err := open(n.Ref)
	if err != nil {
		return Failed, "", err
	}
	if c, ok := k.(io.Closer); ok {
		defer c.Close()
	}
	value, err := k.Read()
	if err != nil {
		return Failed, "", err
	}
	next := n
	next.claims = left
	result, to := Restored, next.composed(k)
	if len(left) > 0 {
		result = Released
	}
	switch {
	case value == n.Before && (len(left) == 0 || n.Wrote != n.Before):
		result = Unchanged
	case !n.ours(k, value):
		result = Foreign
	case len(left) == 0:
		err = j.set(k, to)
	case value == to:
		next.Wrote, next.Prior = to, nil
	default:
		next.Wrote, next.Prior = to, &value
		if err := j.put(next); err != nil {
			return Failed, "", err
		}
		if err := j.set(k, to); err != nil {
			return Failed, "", errors.Join(err, j.retreat(k, next, n, value))
		}
		next.Prior = nil
	}
	if err != nil {
		return Failed, "", err
	}
	// The claims in left may have changed meanwhile: keep their current state.
	return result, value, j.change(n.Ref, func(now note) note {
		now.Wrote, now.Prior = next.Wrote, next.Prior
		now.claims = slices.DeleteFunc(slices.Clone(now.claims), func(c claim) bool {
			return !slices.ContainsFunc(left, func(l claim) bool { return l.Owner.Feature == c.Owner.Feature })
		})
		return now
	})
}
