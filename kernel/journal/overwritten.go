package journal

import (
	"errors"
	"strings"
)

// Overwritten returns the features whose claims on a file are not in force any more, because
// another program has written there. claimed is false if nobody claims the file. path is a Ref's
// Object, up to the first space: a file with a line for each device has several knobs.
func (j *Journal) Overwritten(open Opener, path string) (features []string, claimed bool, err error) {
	for _, n := range j.sorted(func(e Entry) bool { return e.Ref.Object == path || strings.HasPrefix(e.Ref.Object, path+" ") }) {
		claimed = true
		of, err := j.overwritten(open, n.Ref)
		if err != nil {
			return nil, true, err
		}
		features = append(features, of...)
	}
	return features, claimed, nil
}

func (j *Journal) overwritten(open Opener, ref Ref) (features []string, err error) {
	leave, err := j.places.enter(ref.place(), j.patience) // a Turn that is under way has ended by then
	if err != nil {
		return nil, err
	}
	defer leave()
	k, err := open(ref)
	if err != nil {
		return nil, err
	}
	value, err := k.Read()
	n, _ := j.note(ref) // without claims if it has been dropped meanwhile
	if errors.Is(err, ErrGone) || err == nil && n.ours(k, value) {
		return nil, nil
	}
	for _, c := range n.claims {
		features = append(features, c.Owner.Feature)
	}
	return features, err
}
