package journal

import (
	"fmt"
	"time"
)

// Setting is the value that a Knob is to have. A list of settings is a plan: what
// makes it need not touch the host, so that it can be shown and tested before it is
// carried out.
type Setting struct {
	Knob  Knob
	Value string
}

// String says which knob and which value, as in "threaded 4026531840/2/threaded = 1".
func (s Setting) String() string {
	ref := s.Knob.Ref()
	return fmt.Sprintf("%s %s = %s", ref.Kind, ref.Object, s.Value)
}

// TurnAll carries out a plan: it turns the knobs in this order, as TurnUntil does,
// up to the first that cannot be turned. What was turned by then stays turned, and
// is in the journal.
func (j *Journal) TurnAll(plan []Setting, by Owner, expiry time.Time) error {
	for _, s := range plan {
		if err := j.TurnUntil(s.Knob, s.Value, by, expiry); err != nil {
			return err
		}
	}
	return nil
}
