package charge

import "time"

// logLimiter keeps a lasting problem from filling the log. It holds the last problem that was
// logged.
type logLimiter struct {
	cause string
	at    time.Time
}

// logAgain is the time until the same problem is logged again. A problem that comes and goes all
// the time, which a container can cause, is logged no more often either.
const logAgain = 10 * time.Minute

// isNews reports whether to log an error: its cause differs from the last one's.
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

// cause returns the innermost error, of several the first. The outer ones may contain values that
// change each time.
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
