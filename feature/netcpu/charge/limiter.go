package charge

import "time"

// logLimiter keeps a problem that lasts from filling the log. It holds the last one
// that was logged.
type logLimiter struct {
	cause string
	at    time.Time
}

// logAgain is how long a problem is old news. One that comes and goes all the time,
// as a container may have it do, is logged no more often either.
const logAgain = 10 * time.Minute

// isNews says whether an error is worth a line of the log: it has another cause than
// the last.
func (t *logLimiter) isNews(err error, now time.Time) bool {
	if err == nil {
		return false
	}
	text := cause(err).Error()
	if text == t.cause && now.Sub(t.at) < logAgain {
		return false
	}
	*t = logLimiter{text, now}
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
