package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// arm names the state of a measurement: without protection, with it, or with a peer of this name in
// the report.
type arm string

const (
	armOff arm = "off"
	armOn  arm = "on"
	// armAll is one measurement of all arms of a case, which adds its figures itself.
	armAll arm = ""
)

// offOn are the arms of most cases.
func offOn() []arm { return []arm{armOff, armOn} }

// figure is one value of one metric.
type figure struct {
	metric, unit string
	value        float64
}

// plan is one rig of an experiment, with its series.
type plan struct {
	name   string // name of the rig in errors
	engine bool   // the rig needs a Docker Engine
	rigged
	series []series
}

// rigged is a rig. close is always called, and also removes the remains of a failed build.
type rigged interface {
	build(context.Context) error
	close() error
}

// series has cases that are measured in rounds. A round measures each case with each of its arms. The
// order of the arms alternates from case to case and from round to round, so that the protection is
// switched half as often, and no arm is always the first.
type series struct {
	rounds  int                         // 0: the rounds of the experiment
	begin   func(context.Context) error // starts the load, paused; nil: nothing to start
	cases   []armed
	inOrder bool   // the arms do not alternate, because some depend on earlier ones
	compare func() // adds figures that compare the measurements of a round; nil: none
	end     func() error
}

// armed is one case with its arms.
type armed struct {
	name    string
	quick   bool        // also with --quick
	base    bool        // other cases are compared with it: it is measured with any of them, and not listed
	needs   rig.Service // a program; "": none
	arms    []arm
	measure func(context.Context, arm) ([]figure, error)
}

// measurements returns the number of measurements in a number of rounds.
func (p plan) measurements(rounds int) (n int) {
	for _, s := range p.series {
		for _, c := range s.cases {
			n += cmp.Or(s.rounds, rounds) * len(c.arms)
		}
	}
	return n
}

// experiment is one run over the rigs of an experiment.
type experiment struct {
	report      *report.Report
	progress    func(done, total int, what string)
	done, total int
	mode        string
	settle      time.Duration
	take        time.Duration

	quiet   quiet
	foreign float64 // most CPUs that other programs used beside an idle rig
	missing string  // why the protection had no effect; "" if it had one
	// unmetered says why the agent keeps no accounts; "" if it keeps them.
	unmetered string
	notes     []string
}

// run measures the plans one after the other. It returns ErrBusy while another experiment runs.
func (e *experiment) run(ctx context.Context, plans []plan) (*report.Report, error) {
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := rig.Sweep(); err != nil {
		return nil, err
	}
	for _, p := range plans {
		e.total += p.measurements(e.report.Rounds)
	}
	for _, p := range plans {
		if err := e.measure(ctx, p); err != nil {
			return nil, fmt.Errorf("%s experiment, %s: %w", e.report.Bench, p.name, err)
		}
	}
	if e.missing != "" {
		e.notes = append(e.notes, fmt.Sprintf("fairlead had no effect: %s is %s", e.report.Bench, strings.TrimSuffix(e.missing, ".")))
	}
	if e.unmetered != "" {
		e.notes = append(e.notes, "the agent keeps no accounts: "+strings.TrimSuffix(e.unmetered, "."))
	}
	e.report.Env.Notes = append(e.notes, e.quiet.notes(e.foreign)...)
	return e.report, nil
}

// measure builds the rig of a plan, measures its series, and removes the rig.
func (e *experiment) measure(ctx context.Context, p plan) (err error) {
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.build(ctx); err != nil {
		return err
	}
	for _, s := range p.series {
		if err := e.rounds(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (e *experiment) rounds(ctx context.Context, s series) error {
	if s.begin != nil {
		if err := s.begin(ctx); err != nil {
			return err
		}
	}
	for round := range cmp.Or(s.rounds, e.report.Rounds) {
		for i, c := range s.cases {
			arms := slices.Clone(c.arms)
			if !s.inOrder && (round+i)%2 == 1 {
				slices.Reverse(arms)
			}
			for _, a := range arms {
				what := c.name
				if a != armAll {
					what += ", " + string(a)
				}
				if e.progress != nil {
					e.progress(e.done, e.total, fmt.Sprintf("round %d: %s", round+1, what))
				}
				e.done++
				figures, err := c.measure(ctx, a)
				if err := errors.Join(ctx.Err(), err); err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
				e.add(c.name, a, figures...)
			}
		}
		if s.compare != nil {
			s.compare()
		}
	}
	if s.end != nil {
		return s.end()
	}
	return nil
}

// add adds figures of a case, measured with an arm, to the report.
func (e *experiment) add(name string, a arm, figures ...figure) {
	for _, f := range figures {
		e.report.Add(name, f.metric, f.unit, string(a), f.value)
	}
}

// disturbed is the fraction of a window that the hypervisor may take from the CPUs.
const disturbed = 0.02

// quiet keeps the neighbours of a virtual machine out of the figures: the hypervisor may
// give them the CPU that a container seems to use. A window that they disturb is measured
// again.
type quiet struct {
	takes          int // most tries for a window; 0 is one
	windows, again int
	worst          float64 // most disturbed window that was kept
}

// take measures until a sample is not disturbed, at most takes times, and returns the
// sample that was disturbed least.
func (q *quiet) take(measure func() (sample, error)) (best sample, err error) {
	for i := range max(q.takes, 1) {
		m, err := measure()
		if err != nil {
			return sample{}, err
		}
		if i == 0 {
			q.windows++
		} else {
			q.again++
		}
		if i == 0 || m.steal < best.steal {
			best = m
		}
		if best.steal <= disturbed {
			break
		}
	}
	q.worst = max(q.worst, best.steal)
	return best, nil
}

// notes returns facts about the machine that a reader needs to judge the report. foreign is the highest
// number of CPUs that other programs used beside an idle rig.
func (q quiet) notes(foreign float64) (n []string) {
	if foreign > 0.15 {
		n = append(n, fmt.Sprintf("other work took up to %.0f %% of a CPU while the rig was idle, so the figures are noisy", foreign*100))
	}
	if q.again > 0 || q.worst > disturbed {
		n = append(n, fmt.Sprintf("the hypervisor took CPU time: of %d windows %d were measured again, and of those that count it took up to %.0f %%", q.windows, q.again, q.worst*100))
	}
	return n
}
