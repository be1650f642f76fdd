package bench

import (
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/fairlead-project/fairlead/bench/report"
)

// Options are what an experiment is told.
type Options struct {
	Rounds  int           // 0: as many as is usual
	Window  time.Duration // how long to measure; 0: as is usual
	Settle  time.Duration // of netcpu: how long the load runs before that; 0: as is usual
	Quick   bool          // within two minutes, with fewer cases, and less exact
	Docker  bool          // containers of a Docker Engine in place of sandboxes
	Mode    string        // of netcpu while it is on; "" is isolate
	Only    string        // a regular expression for the cases to measure; "" is all
	Version string        // of fairlead, for the report
	// Progress, if not nil, is called before each measurement with how many
	// are done, how many there will be, and what comes.
	Progress func(done, total int, what string)
}

// ErrNoCase means that Options choose no case.
var ErrNoCase = errors.New("no case has such a name")

// choose gives the rigs, or cases, of a catalogue that keep wants, and the names of the
// cases. keep asks chosen whether the options choose a case, by its name and by whether
// --quick has it, and may take cases out of its rig. Error: ErrNoCase, if nothing is left.
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

// usual is how an experiment measures unless the options say otherwise.
type usual struct {
	rounds       int
	settle, take time.Duration // how long the load runs before a window, and in it
	takes        int           // of a window that is disturbed; 0 is one
}

// experiment makes one that measures as usual, or, with --quick, as quick says.
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
		progress: o.Progress, settle: u.settle, take: u.take, takes: u.takes,
	}
}
