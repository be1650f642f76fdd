package bench

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// Options control an experiment.
type Options struct {
	Rounds  int           // 0: the experiment's default
	Window  time.Duration // length of a measurement; 0: the experiment's default
	Quick   bool          // end within two minutes: fewer cases, less exact
	Mode    string        // netcpu: the mode while the protection is on; "" is isolate
	Only    string        // a regular expression that selects cases; "" selects all
	Far     bool          // Check: repeat only what may miss its bar by far
	Version string        // version of fairlead, for the report
	// Progress, if not nil, is called before each measurement with the number of
	// measurements done, their total, and the name of the next one.
	Progress func(done, total int, what string)
}

// ErrNoCase means that Options select no case.
var ErrNoCase = errors.New("no case has such a name")

// choose returns the plans with the cases that the options select, and the names of these. Error:
// ErrNoCase.
func choose(plans []plan, o Options) (list []plan, names []string, err error) {
	only, err := regexp.Compile(o.Only)
	if err != nil {
		return nil, nil, err
	}
	list = filter(plans, func(_ plan, c armed) bool {
		if !only.MatchString(c.name) || o.Quick && !c.quick && o.Only == "" {
			return false
		}
		names = append(names, c.name)
		return true
	})
	if len(list) == 0 {
		return nil, nil, fmt.Errorf("%w: %q", ErrNoCase, o.Only)
	}
	return list, names, nil
}

// onMachine reports whether a program is installed.
func onMachine(program string) bool { return rig.Service(program).Program() != "" }

// installed returns the plans with the cases for which this machine has what they need, and a note for
// each thing that it does not have. noEngine is what a Docker Engine lacks; nil: nothing.
func installed(plans []plan, have func(program string) bool, noEngine error) (list []plan, notes []string) {
	note := func(format string, args ...any) {
		if n := fmt.Sprintf(format, args...); !slices.Contains(notes, n) {
			notes = append(notes, n)
		}
	}
	list = filter(plans, func(p plan, c armed) bool {
		if p.engine && noEngine != nil {
			note("what needs a Docker Engine was left out: %v", noEngine)
			return false
		}
		if c.needs == "" || have(string(c.needs)) {
			return true
		}
		note("%s is not installed (Debian package %s): the cases with it were left out", c.needs, c.needs.Package())
		return false
	})
	return list, notes
}

// filter returns the plans with the cases that keep accepts.
func filter(plans []plan, keep func(plan, armed) bool) (list []plan) {
	listed := func(c armed) bool { return !c.base }
	for _, p := range plans {
		var left []series
		for _, s := range p.series {
			s.cases = slices.DeleteFunc(slices.Clone(s.cases), func(c armed) bool { return !c.base && !keep(p, c) })
			if slices.ContainsFunc(s.cases, listed) {
				left = append(left, s)
			}
		}
		if p.series = left; len(left) > 0 {
			list = append(list, p)
		}
	}
	return list
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
