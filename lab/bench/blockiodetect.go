package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

const (
	lossOf    = 0.1             // a load that loses this fraction of its IOPS is interfered with
	declareIn = 2 * time.Second // time limit for a declaration
)

// circumstance is one condition for the detector: how it begins, and how it ends.
type circumstance struct {
	name       string
	burners    int
	begin, end func() error
	calm       bool // no interference, whoever else computes
}

func nothing() error { return nil }

// circumstances returns the interference: up to two burners for each CPU, and all burners, because
// a load with one thread notices more of those. It also returns conditions without interference: no
// burner, a paused load, a load with a quota, alone and beside all burners, one with a small
// real-time budget beside them, and a load that competes with its own threads.
func (r *blockioRig) circumstances(ctx context.Context) (all []circumstance) {
	beside := func(n int) circumstance {
		return circumstance{name: fmt.Sprintf("%d burners", n), burners: n, begin: nothing, end: nothing, calm: n == 0}
	}
	for n := range 2*runtime.NumCPU() + 1 {
		all = append(all, beside(n))
	}
	all = append(all, beside(len(r.burners)))
	const period = 100 * time.Millisecond
	limit := func() error { return r.db.Limit(sandbox.CPU{Quota: period / 20, Period: period}) }
	unlimit := func() error { return r.db.Limit(sandbox.CPU{Quota: -1}) }
	set := func(ctx context.Context, in api.SetRequest) error {
		_, err := r.guard.client.Set(ctx, r.db.Name, in)
		return err
	}
	const realtime = "fairlead.io.realtime"
	return append(all,
		circumstance{"idle", len(r.burners), func() error { r.board.SetRate(0); return nil }, func() error { r.board.SetRate(load.Flood); return nil }, true},
		circumstance{"quota", 0, limit, unlimit, true},
		circumstance{"quota beside burners", len(r.burners), limit, unlimit, true},
		circumstance{"own real-time budget", len(r.burners),
			func() error { return set(ctx, api.SetRequest{Set: map[string]string{realtime: "20ms"}}) },
			func() error {
				return set(context.WithoutCancel(ctx), api.SetRequest{Unset: []string{realtime}})
			}, true},
		circumstance{"own threads", 0,
			func() error { return signalAll(r.own, unix.SIGCONT) },
			func() error { return signalAll(r.own, unix.SIGSTOP) }, true},
	)
}

// detect is one round: each circumstance, between two windows without it. The reservation is the
// throughput in the first window, because the speed of a disk changes from minute to minute. A loss
// against the slower of the two windows is due to the circumstance. The agent only observes.
func (r *blockioRig) detect(ctx context.Context, c blockioCase) error {
	row, err := r.achieved(ctx, r.db.Name, r.take/2)
	if err != nil {
		return err
	}
	reserved, err := r.guard.client.Reserve(ctx, api.ReservationRequest{Container: r.db.Name, Device: r.device, BlockIOFigures: row.Achieved})
	if err != nil {
		return err
	}
	defer r.guard.client.DeleteReservation(context.WithoutCancel(ctx), reserved.ID)
	var worst, hits, losses, alarms, calm float64
	var named, right int
	for _, x := range r.circumstances(ctx) {
		s, err := r.sample(ctx, reserved.ID, x)
		if err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
		switch {
		case x.calm:
			calm++
			if s.declared <= declareIn.Seconds() || s.named > 0 {
				alarms++
			}
		case s.part <= 1-lossOf:
			losses++
			if s.declared <= declareIn.Seconds() {
				hits++
			}
			worst = max(worst, min(s.declared, blockioPatience.Seconds()))
			named, right = named+s.named, right+s.right
		}
		if x.name != "idle" {
			r.add(c.name, armOff, figure{PartOfIOPS + ": " + x.name, "1", s.part})
		}
	}
	if losses > 0 {
		r.add(c.name, armOn, figure{Hits, "1", hits / losses}, figure{DetectedIn, "s", worst})
	}
	if named > 0 {
		r.add(c.name, armOn, figure{NamedRight, "1", float64(right) / float64(named)})
	}
	r.add(c.name, armOn, figure{FalseAlarms, "1", alarms / calm})
	return nil
}

// found is the result of one circumstance.
type found struct {
	part         float64 // IOPS, as a fraction of those before or after, whichever are fewer
	declared     float64 // seconds after the begin; infinite if never
	named, right int
}

func (r *blockioRig) sample(ctx context.Context, reservation string, x circumstance) (s found, err error) {
	if err := sleep(ctx, blockioSettle); err != nil {
		return s, err
	}
	alone, due, err := r.undisturbed(ctx, declareIn/2)
	if err != nil {
		return s, err
	}
	if _, err := r.guard.client.ChangeReservation(ctx, reservation, due); err != nil {
		return s, err
	}
	if err := sleep(ctx, declareIn/2+blockioSettle); err != nil { // the agent judges by this window, and earlier declarations are over
		return s, err
	}
	beside, err := r.during(ctx, x, &s)
	if err != nil {
		return s, err
	}
	if err := sleep(ctx, blockioSettle); err != nil {
		return s, err
	}
	after, err := r.window(ctx, declareIn/2)
	s.part = beside.rate / min(alone.rate, after.rate)
	return s, err
}

// during measures the load under a circumstance, and finds the time of the agent's declaration.
func (r *blockioRig) during(ctx context.Context, x circumstance, s *found) (beside work, err error) {
	start := time.Now()
	defer func() { err = errors.Join(err, x.end(), r.burn(0)) }()
	if err := errors.Join(x.begin(), r.burn(x.burners)); err != nil {
		return beside, err
	}
	if err := sleep(ctx, blockioSettle); err != nil { // at first the scheduler favours a load that slept
		return beside, err
	}
	if beside, err = r.window(ctx, max(r.take, declareIn/2)); err != nil {
		return beside, err
	}
	for s.declared = math.Inf(1); ; {
		if s.declared, s.named, s.right, err = r.declared(ctx, start); err != nil || s.named > 0 || time.Since(start) > declareIn+blockioSettle {
			return beside, err
		}
		if err := sleep(ctx, blockioPoll); err != nil {
			return beside, err
		}
	}
}
