package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// Experiment is an experiment of `fairlead-lab bench`.
type Experiment struct {
	Name, Short    string
	Rounds, Window string // defaults, in words

	Cases func(Options) ([]string, error) // names of the selected cases; error: ErrNoCase
	// Run measures the selected cases. It needs root and two CPUs. When its context ends, Run removes
	// the rigs before it returns.
	Run  func(context.Context, Options) (*report.Report, error)
	Bars func() []report.Bar

	Modes []string // values of Options.Mode; the bars are for the first
}

// Experiments lists the experiments. A new feature adds its own.
func Experiments() []Experiment {
	const ms = time.Millisecond
	netcpu := experimentOf("netcpu", "Measure what neighbours' packets cost a victim on the same CPU",
		usual{rounds: 5, settle: 300 * ms, take: 2 * time.Second, takes: 3}, usual{rounds: 2, settle: 150 * ms, take: 400 * ms, takes: 1}, netcpuPlans, NetCPUBars)
	netcpu.Modes = []string{"isolate", "charge", "auto"}
	return []Experiment{
		netcpu,
		experimentOf("traffic", "Measure how containers share an uplink: with fairlead, tc by hand, and nothing",
			usual{rounds: 3, settle: 500 * ms, take: 2 * time.Second}, usual{rounds: 1, settle: 300 * ms, take: 500 * ms}, trafficPlans, trafficBars),
		experimentOf("latency", "How far round trips from a container are off, raw and corrected, and what measuring costs",
			usual{rounds: 5, settle: 300 * ms, take: 2 * time.Second}, usual{rounds: 2, settle: 150 * ms, take: 500 * ms}, latencyPlans, latencyBars),
		experimentOf("blockio", "How a load at a disk fares beside neighbours that compute, with nothing done and with a reservation",
			usual{rounds: 5, take: 2 * time.Second}, usual{rounds: 2, take: time.Second}, blockioPlans, blockioBars),
		experimentOf("overlay", "Measure containers of two hosts that talk over an overlay network",
			usual{rounds: 3, settle: 300 * ms, take: 1500 * ms}, usual{rounds: 2, settle: 200 * ms, take: time.Second}, overlayPlans, overlayBars),
	}
}

// experimentOf makes an experiment from plans.
func experimentOf(name, short string, u, quick usual, plans func(*experiment, Options) []plan, bars func() []report.Bar) Experiment {
	return Experiment{
		Name: name, Short: short, Bars: bars,
		Rounds: fmt.Sprintf("%d, with --quick %d", u.rounds, quick.rounds),
		Window: fmt.Sprintf("%v, with --quick %v", u.take, quick.take),
		Cases: func(o Options) ([]string, error) {
			_, names, err := choose(plans(o.experiment(name, u, quick), o), o)
			return names, err
		},
		Run: func(ctx context.Context, o Options) (*report.Report, error) {
			e := o.experiment(name, u, quick)
			list, _, err := choose(plans(e, o), o)
			if err != nil {
				return nil, err
			}
			noEngine := rig.EngineRuns()
			list, notes := installed(list, func(program string) bool { return rig.Service(program).Program() != "" }, noEngine)
			e.notes = append(e.notes, notes...)
			if len(list) == 0 && noEngine != nil {
				return nil, fmt.Errorf("%s experiment: %w", name, noEngine)
			}
			return e.run(ctx, list)
		},
	}
}

// Options control an experiment.
type Options struct {
	Rounds  int           // 0: the experiment's default
	Window  time.Duration // length of a measurement; 0: the experiment's default
	Quick   bool          // end within two minutes: fewer cases, less exact
	Mode    string        // netcpu: the mode while the protection is on; "" is isolate
	Only    string        // a regular expression that selects cases; "" selects all
	Far     bool          // Check: repeat only cases that may miss a bar by far
	Version string        // version of fairlead, for the report
	// Progress, if not nil, is called before each measurement with the number of
	// measurements done, their total, and the name of the next one.
	Progress func(done, total int, what string)
}

// ErrNoCase means that Options select no case.
var ErrNoCase = errors.New("no case has such a name")

// choose returns the plans with the cases that the options select, and the names of the cases. Error:
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
		return nil, nil, ErrNoCase
	}
	return list, names, nil
}

// installed returns the plans with the cases that can run on this machine, and a note for each missing
// program. noEngine says what a Docker Engine lacks; nil: nothing.
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
	settle, take time.Duration // time of load before a window, and length of the window
	takes        int           // tries for a window that others disturb; 0: one
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

// NetCPUBars are the bars for the figures of NetCPU in its default mode.
func NetCPUBars() []report.Bar {
	return slices.Concat(netcpuBars(), accountBars(), slowedBars(
		"hop 50/50 tcp", "hop 50/50 tcp-rr", "nic 50/50 flood", "nic 50/50 tcp", "nic 50/50 tcp-rr",
		"udp-send 10 1G", "tcp-send 10 100 flows 1G", "udp-recv 7 of 8 400k", "udp-recv 7 of 8 flood",
		"tcp-recv 7 of 8 100 flows", "cap 3x30 udp-recv"))
}

// Check runs an experiment over the cases that bars name, and judges each bar. It measures
// a case up to report.Repetitions times in all, while one of its bars is undecided; with
// o.Far, while a bar may be missed by far. The report has the rounds of all repetitions.
func Check(ctx context.Context, o Options, bars []report.Bar, run func(context.Context, Options) (*report.Report, error)) (*report.Report, error) {
	if o.Rounds == 0 && o.Quick {
		o.Rounds = 2 // fewer have no spread
	}
	var repetitions []*report.Report
	var outcomes []report.Outcome
	if progress := o.Progress; progress != nil {
		o.Progress = func(done, total int, what string) {
			progress(done, total, fmt.Sprintf("repetition %d, %s", len(repetitions)+1, what))
		}
	}
	for todo := barCases(bars); len(todo) > 0 && len(repetitions) < report.Repetitions; {
		o.Only = "^(" + strings.Join(todo, "|") + ")$"
		r, err := run(ctx, o)
		if err != nil {
			return nil, err
		}
		repetitions, outcomes = append(repetitions, r), nil
		var undecided []report.Bar
		for _, b := range bars {
			outcome := b.Judge(repetitions)
			if outcome.Undecided && (!o.Far || outcome.Missed()) {
				undecided = append(undecided, b)
			}
			outcomes = append(outcomes, outcome)
		}
		todo = barCases(undecided)
	}
	r := repetitions[0]
	for _, more := range repetitions[1:] {
		r.Append(more)
	}
	r.Bars = outcomes
	return r, nil
}

// barCases returns a regular expression for each case that the bars name.
func barCases(bars []report.Bar) (cases []string) {
	for _, b := range bars {
		if name := regexp.QuoteMeta(b.Case); !slices.Contains(cases, name) {
			cases = append(cases, name)
		}
	}
	return cases
}

// ErrBusy means that another experiment runs on this machine. Two at once
// would measure each other.
var ErrBusy = errors.New("another experiment is under way on this machine")

// only locks out other experiments until the caller calls release or the process ends. The lock is an
// abstract socket, which leaves nothing behind.
func only() (release func(), err error) {
	l, err := net.Listen("unix", "@fairlead-bench")
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, ErrBusy
	}
	if err != nil {
		return nil, fmt.Errorf("lock out other experiments: %w", err)
	}
	return func() { l.Close() }, nil
}
