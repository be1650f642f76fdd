package view

import (
	"testing"
	"time"
)

func TestWhen(t *testing.T) {
	zone := time.FixedZone("", 3600)
	now := time.Date(2026, 11, 26, 14, 30, 15, 0, zone)
	for s, want := range map[string]time.Time{
		"now":                  now,
		"10 min ago":           now.Add(-10 * time.Minute),
		"10m ago":              now.Add(-10 * time.Minute),
		"1h30m ago":            now.Add(-90 * time.Minute),
		"1 hour 5 seconds ago": now.Add(-time.Hour - 5*time.Second),
		" 2 days ago ":         now.Add(-48 * time.Hour),
		"14:05":                time.Date(2026, 11, 26, 14, 5, 0, 0, zone),
		"14:31":                time.Date(2026, 11, 25, 14, 31, 0, 0, zone),
		"14:05:30":             time.Date(2026, 11, 26, 14, 5, 30, 0, zone),
		"2026-11-20 08:00":     time.Date(2026, 11, 20, 8, 0, 0, 0, zone),
		"2026-11-20T08:00:00Z": time.Date(2026, 11, 20, 8, 0, 0, 0, time.UTC),
	} {
		if got, err := When(s, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: %v %v, want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "ago", "ten min ago", "10 parsecs ago", "10", "10 min", "25:00", "999999999 days ago", "-5 min ago", "yesterday"} {
		if got, err := When(s, now); err == nil {
			t.Errorf("%q: %v", s, got)
		}
	}
}

func FuzzWhen(f *testing.F) {
	for _, s := range []string{"10 min ago", "1h30m ago", "14:05", "2026-11-26 14:05:00", "2026-11-26T14:05:00Z", "now", "999999999d999999999d ago"} {
		f.Add(s)
	}
	now := time.Date(2026, 11, 26, 14, 30, 15, 0, time.UTC)
	f.Fuzz(func(t *testing.T, s string) {
		got, err := When(s, now)
		if err == nil && len(s) > 3 && s[len(s)-3:] == "ago" && got.After(now) {
			t.Errorf("%q is %v, after now", s, got)
		}
	})
}
