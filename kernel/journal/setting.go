package journal

import (
	"fmt"
	"time"
)

// Setting is a Knob and its desired value. A list of settings is a plan. Making a plan need not
// touch the host, so a plan can be shown and tested before it is carried out.
type Setting struct {
	Knob
	Value string
}

// String returns knob and value, as in "threaded 4026531840/2/threaded = 1".
func (s Setting) String() string {
	ref := s.Knob.Ref()
	return fmt.Sprintf("%s %s = %s", ref.Kind, ref.Object, s.Value)
}

// TurnAll carries out a plan. Like TurnUntil, it turns the knobs in this order, up to the first
// that cannot be turned. Knobs turned by then stay turned, and are in the journal.
func (j *Journal) TurnAll(plan []Setting, by Owner, expiry time.Time) error {
	for _, s := range plan {
		if err := j.TurnUntil(s.Knob, s.Value, by, expiry); err != nil {
			return err
		}
	}
	return nil
}
