package main

import (
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// parseWhen returns the time that a user means: "10 min ago", "14:30" (the last time that it was), a
// date with a time, or RFC 3339. Times without a zone are local. flag is for the error.
func parseWhen(flag, text string, now time.Time) (time.Time, error) {
	s := strings.TrimSpace(text)
	if d, ok := strings.CutSuffix(s, "ago"); ok {
		if d, err := time.ParseDuration(goDuration(d)); err == nil && d >= 0 {
			return now.Add(-d), nil
		}
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02 15:04:05", "2006-01-02T15:04:05", "2006-01-02 15:04", "2006-01-02T15:04"} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return t, nil
		}
	}
	for _, layout := range []string{"15:04:05", "15:04"} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			y, m, d := now.Date()
			t = time.Date(y, m, d, t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			if t.After(now) {
				t = time.Date(y, m, d-1, t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			}
			return t, nil
		}
	}
	return time.Time{}, cli.Usagef("%s %q: must be like \"10 min ago\", \"14:30\", \"2026-03-01 14:30\" or RFC 3339", flag, text)
}

// goDuration writes "1 h 10 min" as Go does.
func goDuration(s string) string {
	s = strings.NewReplacer(" ", "", "minutes", "m", "minute", "m", "min", "m", "hours", "h", "hour", "h", "seconds", "s", "second", "s", "sec", "s").Replace(s)
	return s
}
