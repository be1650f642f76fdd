package journal

import (
	"errors"
	"io"
)

// Overwritten returns the owners of the claims that are no longer in force because another program
// wrote to their knobs, for the entries that match. claimed is false if no entry matches. It
// continues after an error.
func (j *Journal) Overwritten(open Opener, match func(Entry) bool) (by []Owner, claimed bool, err error) {
	var errs []error
	for _, n := range j.sorted(match) {
		claimed = true
		of, err := j.overwritten(open, n.Ref)
		by, errs = append(by, of...), append(errs, err)
	}
	return by, claimed, errors.Join(errs...)
}

func (j *Journal) overwritten(open Opener, ref Ref) (by []Owner, err error) {
	leave, err := j.places.enter(ref.place(), j.patience) // a Turn in progress ends first
	if err != nil {
		return nil, err
	}
	defer leave()
	k, err := open(ref)
	value := ""
	if err == nil {
		value, err = k.Read()
	}
	if c, ok := k.(io.Closer); ok {
		defer c.Close()
	}
	n, _ := j.note(ref) // without claims if it was dropped meanwhile
	if errors.Is(err, ErrGone) || err == nil && n.ours(k, value) {
		return nil, nil
	}
	for _, c := range n.claims {
		by = append(by, c.Owner)
	}
	return by, err
}
