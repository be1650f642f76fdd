package view

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/api"
)

// Show makes a string that a container may have chosen safe to print. It keeps a printable string,
// turns any other into a Go string literal, and turns an empty one into "-".
func Show(s string) string {
	if s == "" {
		return "-"
	}
	return ShowText(s)
}

// ShowText is Show for text that may be empty.
func ShowText(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return strconv.Quote(s)
	}
	return s
}

// Neighbour returns the name of the other container of a slowdown, safe to print. Brackets mark
// names of ours: (host), (others) if it may be several containers, (unnamed).
func Neighbour(id api.ID, name, cause string) string {
	switch name = ShowText(name); {
	case name != "" && name[0] == '(':
		return strconv.Quote(name)
	case name != "":
		return name
	case id != 0:
		return "(unnamed)"
	case cause == api.SlowedByPackets:
		return "(host)"
	}
	return "(others)"
}

// Scale formats a number with three digits and a decimal prefix: "148M".
func Scale(v float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= 0.9995*unit.size {
			n := v / unit.size
			return fmt.Sprintf("%.*f%s", decimals(n), n, unit.name)
		}
	}
	return fmt.Sprintf("%.0f", v)
}

func decimals(v float64) int { return max(0, 2-int(math.Floor(math.Log10(max(v*1.0005, 1))))) }

// Bits formats a rate in bit/s: "148Mbit".
func Bits(v float64) string { return Scale(v) + "bit" }

// Brief formats a time in seconds in a suitable unit: "1.25ms".
func Brief(sec float64) string {
	d := time.Duration(sec * float64(time.Second))
	switch {
	case d < time.Microsecond:
		return "<1us"
	case sec < 0.9995e-3:
		return fmt.Sprintf("%.0fus", float64(d)/1e3)
	case sec < 0.9995:
		return fmt.Sprintf("%.3gms", float64(d)/1e6)
	case sec < 999.5: // above that, %.3g would print 1e+03
		return fmt.Sprintf("%.3gs", sec)
	}
	return fmt.Sprintf("%.0fs", d.Seconds())
}

// Percent formats a fraction of 1 without decimals: "23 %"; above 0 and below 1 %, "<1 %".
func Percent(part float64) string {
	switch {
	case part <= 0:
		return "0 %"
	case part < 0.01:
		return "<1 %"
	}
	return fmt.Sprintf("%.0f %%", 100*part)
}

// of formats a value and its bound: "4.2k/5k"; a bound of 0 means none.
func of(v, bound float64) string {
	switch {
	case bound > 0:
		return round(v) + "/" + round(bound)
	case v > 0:
		return round(v)
	}
	return "-"
}

// round is Scale without trailing zeros: "5k".
func round(v float64) string {
	s := Scale(v)
	number := strings.TrimRight(s, "kMGT")
	if strings.Contains(number, ".") {
		return strings.TrimRight(strings.TrimRight(number, "0"), ".") + s[len(number):]
	}
	return s
}

// agoForm matches one or more numbers with units: "1 h 30 min".
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
