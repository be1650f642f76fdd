package columns

import (
	"cmp"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
)

// Ago formats the time from t to now, in one unit.
func Ago(t, now time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return view.Age(t, now) + " ago"
}

// Span formats a time in one unit.
func Span(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.1f h", d.Hours())
	}
	return fmt.Sprintf("%.1f days", d.Hours()/24)
}

// Name names a container, safe to print: by its id if it has no name.
func Name(id api.ID, name string) string {
	return cmp.Or(cli.ShowText(name), "id "+id.String())
}

// Whom describes a container that a verb has changed.
func Whom(name, source string, id api.ID) string {
	return fmt.Sprintf("%s (%s, id %s)", cli.Show(name), cli.Show(source), id)
}

// If is a cell that has its text only under a condition.
func If(is bool, text string) string {
	if is {
		return text
	}
	return ""
}
