package netcpu

import "time"

// told is the last problem that somebody was told of.
type told struct {
	cause string
	at    time.Time
}

// tellAgain is how long a problem is old news. What comes and goes all the time,
// as a container may have it do, is told no more often either.
const tellAgain = 10 * time.Minute

// news says whether an error is worth telling: it has another cause than the last.
func (t *told) news(err error, now time.Time) bool {
	if err == nil {
		return false
	}
	text := cause(err).Error()
	if text == t.cause && now.Sub(t.at) < tellAgain {
		return false
	}
	*t = told{text, now}
	return true
}

// cause is the innermost of an error, of several the first: what is around it may
// hold values that are others each time.
func cause(err error) error {
	for {
		var next error
		switch e := err.(type) {
		case interface{ Unwrap() error }:
			next = e.Unwrap()
		case interface{ Unwrap() []error }:
			next = e.Unwrap()[0]
		}
		if next == nil {
			return err
		}
		err = next
	}
}
