package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/report"
)

// The metrics of the blockio experiment.
const (
	PartOfIOPS  = "IOPS, part of the undisturbed"
	TimesP99    = "p99 latency, times the undisturbed"
	DetectedIn  = "interference declared after"
	RecoveredIn = "95 % of the undisturbed after"
	NamedRight  = "burners among the culprits named"
	BurnersKeep = "work of the burners"
	DiskIOPS    = "IOPS"
)

// blockioBurners is how many neighbours compute without end, each in a container of its
// own, as in the paper's figure 5 for so many CPUs.
const blockioBurners = 12

// blockioCase is one load beside which the burners are.
type blockioCase struct {
	name    string
	depth   int
	monitor bool // what measuring costs, without burners
	quick   bool
}

func blockioCatalogue() []blockioCase {
	return []blockioCase{
		{"12 burners, depth 1", 1, false, true},
		{"12 burners, depth 16", 16, false, false},
		{"monitor, depth 1", 1, true, true},
		{"monitor, depth 16", 16, true, false},
	}
}

func (o Options) blockioCases() ([]blockioCase, error) {
	only, err := regexp.Compile(o.Only)
	if err != nil {
		return nil, err
	}
	all := slices.DeleteFunc(blockioCatalogue(), func(c blockioCase) bool {
		return !only.MatchString(c.name) || !c.quick && o.Quick && o.Only == ""
	})
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: %q", ErrNoCase, o.Only)
	}
	return all, nil
}

// BlockIOCases names the cases that BlockIO would measure. It matches ErrNoCase if there
// are none.
func BlockIOCases(o Options) ([]string, error) {
	all, err := o.blockioCases()
	var names []string
	for _, c := range all {
		names = append(names, c.name)
	}
	return names, err
}

// BlockIO runs the experiment of the MIST paper's figures 3 and 5 at this machine's size:
// reads of 4 KiB at random places of a file, past the page cache, beside containers that
// compute without end, with nothing done and with a reservation. It needs root. When ctx ends,
// what was built is removed before it returns.
func BlockIO(ctx context.Context, o Options) (*report.Report, error) {
	e := &experiment{report: &report.Report{Bench: "blockio", Env: environment(o.Version, o.Quick), Rounds: 5}, progress: o.Progress, take: 2 * time.Second}
	if o.Quick {
		e.take, e.report.Rounds = time.Second, 2
	}
	if o.Rounds > 0 {
		e.report.Rounds = o.Rounds
	}
	if o.Window > 0 {
		e.take = o.Window
	}
	cases, err := o.blockioCases()
	if err != nil {
		return nil, err
	}
	release, err := only()
	if err != nil {
		return nil, err
	}
	defer release()
	e.total = len(cases) * e.report.Rounds
	for _, c := range cases {
		if err := e.blockio(ctx, c); err != nil {
			return nil, fmt.Errorf("blockio experiment, %s: %w", c.name, err)
		}
	}
	e.report.Env.Notes = append(e.report.Env.Notes, e.notes...)
	return e.report, nil
}

func (e *experiment) blockio(ctx context.Context, c blockioCase) (err error) {
	r, err := newBlockioRig(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for range e.report.Rounds {
		e.say(c.name)
		round := r.beside
		if c.monitor {
			round = r.monitored
		}
		if err := round(ctx, e, c); err != nil {
			return err
		}
	}
	return nil
}

// reserve reserves so many reads a second; the result ends that.
func (r *blockioRig) reserve(ctx context.Context, iops uint64) (end func() error, err error) {
	x, err := r.client.Reserve(ctx, api.ReservationRequest{Container: blockioName, Device: r.device, BlockIOFigures: api.BlockIOFigures{ReadIOPS: iops}})
	if err != nil {
		return nil, err
	}
	return func() error {
		_, err := r.client.DeleteReservation(context.WithoutCancel(ctx), x.ID)
		return err
	}, nil
}

// monitored measures what measuring costs: short windows without and with a reservation
// in turns, since the machine drifts.
func (r *blockioRig) monitored(ctx context.Context, e *experiment, c blockioCase) error {
	const turns = 4
	var off, on uint64
	for range turns {
		w, err := r.window(ctx, e.take/2)
		if err != nil {
			return err
		}
		off += w.Ops
		end, err := r.reserve(ctx, 1)
		if err != nil {
			return err
		}
		w, err = r.window(ctx, e.take/2)
		if err := errors.Join(err, end()); err != nil {
			return err
		}
		on += w.Ops
	}
	span := turns * (e.take / 2).Seconds()
	e.report.Add(c.name, DiskIOPS, "1/s", false, float64(off)/span)
	e.report.Add(c.name, DiskIOPS, "1/s", true, float64(on)/span)
	return nil
}

// blockioPatience is how long a reservation may take to be met again, and the step in
// which it is looked.
const (
	blockioPatience = 10 * time.Second
	blockioStep     = 100 * time.Millisecond
)

// beside is one round: undisturbed, beside the burners with nothing done, and beside
// them with a reservation.
func (r *blockioRig) beside(ctx context.Context, e *experiment, c blockioCase) error {
	alone, err := r.window(ctx, e.take)
	if err != nil {
		return err
	}
	if err := r.burn(true); err != nil {
		return err
	}
	if err := sleep(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	worked := r.burnt()
	beside, err := r.window(ctx, e.take)
	if err != nil {
		return err
	}
	e.addBlockio(c, alone, beside, r.burnt()-worked, false)
	if err := r.burn(false); err != nil {
		return err
	}

	end, err := r.reserve(ctx, uint64(alone.Rate()))
	if err != nil {
		return err
	}
	defer func() { end() }()                                  // what was said of it is said below
	if err := sleep(ctx, 1500*time.Millisecond); err != nil { // it is measured
		return err
	}
	start := time.Now()
	if err := r.burn(true); err != nil {
		return err
	}
	if err := r.recovers(ctx, e, c, alone.Rate(), start); err != nil {
		return err
	}
	worked = r.burnt()
	if beside, err = r.window(ctx, e.take); err != nil {
		return err
	}
	e.addBlockio(c, alone, beside, r.burnt()-worked, true)
	return r.burn(false)
}

func (e *experiment) addBlockio(c blockioCase, alone, beside load.Window, work uint64, on bool) {
	e.report.Add(c.name, PartOfIOPS, "1", on, beside.Rate()/alone.Rate())
	e.report.Add(c.name, TimesP99, "1", on, float64(beside.Latency(0.99))/float64(alone.Latency(0.99)))
	e.report.Add(c.name, BurnersKeep, "1/s", on, float64(work)/beside.Seconds)
}

// recovers waits until interference is declared and the load is what it was, and says
// how long each took, and who was named.
func (r *blockioRig) recovers(ctx context.Context, e *experiment, c blockioCase, alone float64, start time.Time) error {
	detected, recovered := math.Inf(1), math.Inf(1)
	before := r.board.Read()
	for time.Since(start) < blockioPatience && (math.IsInf(detected, 1) || math.IsInf(recovered, 1)) {
		if err := sleep(ctx, blockioStep); err != nil {
			return err
		}
		now := r.board.Read()
		if w := now.Since(before); !math.IsInf(detected, 1) && math.IsInf(recovered, 1) && w.Rate() >= 0.95*alone {
			recovered = time.Since(start).Seconds()
		}
		before = now
		if !math.IsInf(detected, 1) {
			continue
		}
		b, err := r.client.BlockIO(ctx, blockioName, 0)
		if err != nil {
			return err
		}
		named, right := 0, 0
		for _, x := range b.Events {
			if x.What == "interference" && x.Time.After(start) {
				detected = min(detected, x.Time.Sub(start).Seconds())
				if named++; strings.Contains(x.Text, blockioBurner) {
					right++
				}
			}
		}
		if named > 0 {
			e.report.Add(c.name, NamedRight, "1", true, float64(right)/float64(named))
		}
	}
	e.report.Add(c.name, DetectedIn, "s", true, min(detected, blockioPatience.Seconds()))
	e.report.Add(c.name, RecoveredIn, "s", true, min(recovered, blockioPatience.Seconds()))
	return nil
}

// BlockIOHeadline says what came out, in a sentence.
func BlockIOHeadline(r *report.Report) string {
	c, ok := r.Find("12 burners, depth 1", PartOfIOPS)
	if !ok {
		return ""
	}
	return fmt.Sprintf("Beside 12 containers that compute, a load at a disk keeps %.0f %% of its IOPS with nothing done, and %.0f %% with a reservation.",
		100*report.Median(c.Off), 100*report.Median(c.On))
}

// BlockIOPlots are the plots of its page.
func BlockIOPlots(*report.Report, Options) []report.Plot {
	groups := []report.Group{{Label: "depth 1", Case: "12 burners, depth 1"}, {Label: "depth 16", Case: "12 burners, depth 16"}}
	return []report.Plot{
		{Title: "IOPS beside 12 burners", Note: "Part of the undisturbed (MIST, figure 5).", Metric: PartOfIOPS, Ideal: 1, Groups: groups},
		{Title: "p99 latency beside 12 burners", Note: "Times the undisturbed.", Metric: TimesP99, Ideal: 1, Groups: groups},
	}
}
