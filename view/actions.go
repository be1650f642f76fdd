package view

import (
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// Action is what fairlead does or has done for a container, or to it for others.
type Action struct {
	Since   time.Time
	Feature string // safe to print; "" for a decision in place of policy
	Text    string // safe to print
}

// Actions lists what a frame has on a container: decisions in place of policy, what is done about
// its disks, and what has happened to its reservations, the latest first.
func Actions(f api.Frame, id api.ID) []Action {
	var list []Action
	for _, c := range f.Containers {
		if c.ID != id {
			continue
		}
		for _, s := range c.Policy {
			if s.Reason != "" {
				list = append(list, Action{s.Since, "", fmt.Sprintf("%s = %s in place of %s: %s", Show(s.Key), Show(s.Value), Show(s.Instead), ShowText(s.Reason))})
			}
		}
	}
	for _, a := range f.Actions(id) {
		list = append(list, Action{a.Time, Show(a.Feature), ShowText(a.Text)})
	}
	slices.SortStableFunc(list, func(a, b Action) int { return b.Since.Compare(a.Since) })
	return list
}

// Age formats the time from t to now in one unit: "3 min"; "-" without a time.
func Age(t, now time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "-"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(max(d, 0).Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}
