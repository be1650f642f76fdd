package view

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// agoForm is a number and a unit, as often as wanted: "1 h 30 min".
var agoForm = regexp.MustCompile(`^(?:\s*(\d{1,9})\s*(seconds?|secs?|s|minutes?|mins?|m|hours?|h|days?|d))+\s*$`)

var agoPart = regexp.MustCompile(`(\d{1,9})\s*([a-z])`)

// When parses a moment as people write it: "10 min ago", "1h30m ago", "14:05", "14:05:30" (the
// last such time before now), "2026-11-26 14:05" (in now's zone), RFC 3339, or "now".
func When(s string, now time.Time) (time.Time, error) {
	text := strings.TrimSpace(s)
	if text == "now" {
		return now, nil
	}
	if before, ok := strings.CutSuffix(text, "ago"); ok && agoForm.MatchString(before) {
		t := now
		for _, part := range agoPart.FindAllStringSubmatch(before, -1) {
			n, err := strconv.Atoi(part[1])
			if unit := map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour}[part[2]]; err == nil && time.Duration(n) < 100*365*24*time.Hour/unit {
				t = t.Add(-time.Duration(n) * unit)
				continue
			}
			return time.Time{}, fmt.Errorf("%q is too long ago", s)
		}
		return t, nil
	}
	for _, layout := range []string{"15:04", time.TimeOnly} {
		if t, err := time.ParseInLocation(layout, text, now.Location()); err == nil {
			y, m, d := now.Date()
			t = time.Date(y, m, d, t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			if t.After(now) {
				t = time.Date(y, m, d-1, t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			}
			return t, nil
		}
	}
	for _, layout := range []string{"2006-01-02 15:04", time.DateTime, "2006-01-02T15:04", "2006-01-02T15:04:05", time.RFC3339} {
		if t, err := time.ParseInLocation(layout, text, now.Location()); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf(`%q is no time; want for example "10 min ago", 14:05, "2026-11-26 14:05" or RFC 3339`, s)
}
