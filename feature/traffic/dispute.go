package traffic

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// A device is brought back to its plan up to disputes times within disputeTime, and then left as it
// is.
const (
	disputes    = 3
	disputeTime = time.Hour
)

// errLeft reports a device where others keep undoing what is in force.
var errLeft = errors.New("somebody has undone it again and again, and it is left so for an hour")

// left wraps errLeft with what was undone.
func left(what string) error {
	return fmt.Errorf("%w (%s, %d times); possible with: an end to what does so, and the policy set anew", errLeft, what, disputes)
}

// dispute counts how often others undid a change. The zero value counts from 0.
type dispute struct{ at []time.Time }

// again counts one more time, and reports whether to redo the change.
func (d *dispute) again(now time.Time) bool {
	d.at = slices.DeleteFunc(d.at, func(t time.Time) bool { return now.Sub(t) >= disputeTime })
	if len(d.at) >= disputes {
		return false
	}
	d.at = append(d.at, now)
	return true
}
