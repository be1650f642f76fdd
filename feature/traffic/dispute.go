package traffic

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// A device is brought to its plan again as often as disputes within disputeTime, and then
// left to whoever undoes that.
const (
	disputes    = 3
	disputeTime = time.Hour
)

// errLeft is of a device at which somebody keeps undoing what is put into force.
var errLeft = errors.New("somebody has undone it again and again, and it is left so for an hour")

// left is errLeft of what was undone.
func left(what string) error {
	return fmt.Errorf("%w (%s, %d times); possible with: an end to what does so, and the policy set anew", errLeft, what, disputes)
}

// dispute counts how often somebody has undone something. The zero value counts from 0.
type dispute struct{ at []time.Time }

// again notes that it was undone once more, and says whether it is to be put back.
func (d *dispute) again(now time.Time) bool {
	d.at = slices.DeleteFunc(d.at, func(t time.Time) bool { return now.Sub(t) >= disputeTime })
	if len(d.at) >= disputes {
		return false
	}
	d.at = append(d.at, now)
	return true
}
