package bench

import (
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
)

// Options control an experiment.
type Options struct {
	Rounds  int           // 0: the experiment's default
	Window  time.Duration // length of a measurement; 0: the experiment's default
	Settle  time.Duration // netcpu: how long the load runs before a measurement; 0: the default
	Quick   bool          // end within two minutes: fewer cases, less exact
	Mode    string        // netcpu: the mode while the protection is on; "" is isolate
	Only    string        // a regular expression that selects cases; "" selects all
	Version string        // version of fairlead, for the report
	// Progress, if not nil, is called before each measurement with the number of
	// measurements done, their total, and the name of the next one.
	Progress func(done, total int, what string)
}

// ErrNoCase means that Options select no case.
var ErrNoCase = errors.New("no case has such a name")

// choose returns the rigs, or the cases, of a catalogue that keep accepts, and the names of
// the selected cases. keep calls chosen for each case, with its name and whether --quick
// includes it, and may remove cases from a rig. Error: ErrNoCase, if nothing is left.
func choose[T any](o Options, catalogue []T, keep func(one *T, chosen func(name string, quick bool) bool) bool) (list []T, names []string, err error) {
	only, err := regexp.Compile(o.Only)
	if err != nil {
		return nil, nil, err
	}
	chosen := func(name string, quick bool) bool {
		if !only.MatchString(name) || o.Quick && !quick && o.Only == "" {
			return false
		}
		names = append(names, name)
		return true
	}
	for _, one := range catalogue {
		if keep(&one, chosen) {
			list = append(list, one)
		}
	}
	if len(list) == 0 {
		return nil, nil, fmt.Errorf("%w: %q", ErrNoCase, o.Only)
	}
	return list, names, nil
}

// usual holds the defaults of an experiment.
type usual struct {
	rounds       int
	settle, take time.Duration // how long the load runs before a window, and in it
	takes        int           // tries for a window that others disturb; 0 is one
}

// experiment makes an experiment with the defaults u, or with quick for --quick.
func (o Options) experiment(name string, u, quick usual) *experiment {
	if o.Quick {
		u = quick
	}
	if o.Rounds > 0 {
		u.rounds = o.Rounds
	}
	if o.Window > 0 {
		u.take = o.Window
	}
	return &experiment{
		report:   &report.Report{Bench: name, Env: environment(o.Version, o.Quick), Rounds: u.rounds},
		progress: o.Progress, settle: u.settle, take: u.take, quiet: quiet{takes: u.takes},
	}
}
