package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// reserve makes a reservation, and returns a function that ends it.
func (r *blockioRig) reserve(ctx context.Context, name string, f api.BlockIOFigures) (end func() error, err error) {
	x, err := r.client.Reserve(ctx, api.ReservationRequest{Container: name, Device: r.device, BlockIOFigures: f})
	if err != nil {
		return nil, err
	}
	return func() error {
		_, err := r.client.DeleteReservation(context.WithoutCancel(ctx), x.ID)
		return err
	}, nil
}

// achieved measures a container's throughput at the disk.
func (r *blockioRig) achieved(ctx context.Context, name string, over time.Duration) (row api.BlockIORow, err error) {
	b, err := r.client.BlockIO(ctx, name, over)
	for _, x := range b.Rows {
		if "/dev/"+x.Disk == r.device {
			return x, err
		}
	}
	return row, errors.Join(err, fmt.Errorf("%s does nothing at %s", name, r.device))
}

// undisturbed measures the load, and its throughput at the disk in the same window.
func (r *blockioRig) undisturbed(ctx context.Context, over time.Duration) (load.Window, api.BlockIOFigures, error) {
	before := r.board.Read()
	row, err := r.achieved(ctx, blockioName, over)
	return r.board.Read().Since(before), row.Achieved, err
}

// monitored measures the cost of the monitor: the load without it, and with a reservation that is
// met. It alternates between the two, because the machine drifts.
func (r *blockioRig) monitored(ctx context.Context, c blockioCase) error {
	const turns = 4
	var off, on uint64
	var cpu time.Duration
	without := func() error {
		w, err := r.window(ctx, r.take/4)
		off += w.Ops
		return err
	}
	for range turns {
		if err := without(); err != nil {
			return err
		}
		end, err := r.reserve(ctx, blockioName, api.BlockIOFigures{ReadIOPS: 1})
		if err != nil {
			return err
		}
		if err := sleep(ctx, blockioFirst); err != nil {
			return errors.Join(err, end())
		}
		before := cpuTime(r.process.PID)
		w, err := r.window(ctx, r.take/2)
		cpu += cpuTime(r.process.PID) - before
		on += w.Ops
		if err := errors.Join(err, end(), without()); err != nil {
			return err
		}
	}
	span := turns * (r.take / 2).Seconds()
	r.add(c.name, armOff, figure{DiskIOPS, "1/s", float64(off) / span})
	r.add(c.name, armOn, figure{DiskIOPS, "1/s", float64(on) / span}, figure{AgentPart, "1", cpu.Seconds() / span})
	return nil
}

// blockioPatience is the maximum time until a reservation is met again, blockioPoll the
// interval between checks, and blockioSettle the time before a measurement.
const (
	blockioPatience = 10 * time.Second
	blockioPoll     = 100 * time.Millisecond
	blockioSettle   = 500 * time.Millisecond
)

// blockioFirst is the maximum time until a new reservation is met and the agent has measured what
// its container usually waits.
const blockioFirst = 2500 * time.Millisecond

// beside measures the load undisturbed, beside the burners without protection, or beside them with
// a reservation.
func (r *blockioRig) beside(ctx context.Context, c blockioCase, a arm) (figures []figure, err error) {
	switch a {
	case armAlone:
		r.alone, r.due, err = r.undisturbed(ctx, r.take)
		return nil, err
	case armOff:
		w, err := r.disturbed(ctx, blockioSettle)
		r.unhelped = w.cpu
		return r.kept(w), err
	}
	end, err := r.reserve(ctx, blockioName, r.due)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := sleep(ctx, 1500*time.Millisecond); err != nil { // the agent measures the load
		return nil, err
	}
	start := time.Now()
	if err := r.burn(len(r.burners)); err != nil {
		return nil, err
	}
	if figures, err = r.recovers(ctx, start); err != nil {
		return nil, err
	}
	w, err := r.loaded(ctx, r.take)
	if err != nil {
		return nil, err
	}
	figures = append(figures, r.kept(w)...)
	if !c.rig.oneKey {
		return figures, r.burn(0)
	}
	released, err := r.released(ctx)
	return append(figures, r.lost(w.cpu), released), err
}

// loaded is what was done in a window beside the neighbours.
type loaded struct {
	load.Window
	cpu sideTimes // per second
}

// loaded measures the load and its neighbours for the length of a window.
func (r *blockioRig) loaded(ctx context.Context, d time.Duration) (w loaded, err error) {
	used := r.sideTimes()
	w.Window, err = r.window(ctx, d)
	w.cpu = r.sideTimes().since(used)
	return w, err
}

// disturbed measures the load beside all neighbours, which it then stops.
func (r *blockioRig) disturbed(ctx context.Context, settle time.Duration) (w loaded, err error) {
	if err := r.burn(len(r.burners)); err != nil {
		return w, err
	}
	if err := sleep(ctx, settle); err != nil {
		return w, err
	}
	w, err = r.loaded(ctx, r.take)
	return w, errors.Join(err, r.burn(0))
}

// kept returns how much of the undisturbed load is left beside the neighbours.
func (r *blockioRig) kept(w loaded) []figure {
	return []figure{{PartOfIOPS, "1", w.Rate() / r.alone.Rate()}, r.longer(w)}
}

func (r *blockioRig) longer(w loaded) figure {
	return figure{TimesP99, "1", float64(w.Latency(0.99)) / float64(r.alone.Latency(0.99))}
}

// sideTimes is the CPU time of the container with the reservation, and of its neighbours.
type sideTimes struct {
	taken           time.Time
	own, neighbours time.Duration
}

func (r *blockioRig) sideTimes() sideTimes {
	t := sideTimes{taken: time.Now(), own: usage(r.db)}
	for _, b := range r.boxes {
		t.neighbours += usage(b)
	}
	return t
}

func usage(b *sandbox.Box) (used time.Duration) {
	for _, dir := range b.Cgroups() {
		if u, err := cgroup.Usage(dir); err == nil { // the v2 one
			used = u
		}
	}
	return used
}

// since returns both times per second since an earlier reading.
func (t sideTimes) since(before sideTimes) sideTimes {
	per := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) / t.taken.Sub(before.taken).Seconds())
	}
	return sideTimes{t.taken, per(t.own - before.own), per(t.neighbours - before.neighbours)}
}

// lost compares CPU times with a reservation with those without help.
func (r *blockioRig) lost(on sideTimes) figure {
	lost := (r.unhelped.neighbours - on.neighbours) - (on.own - r.unhelped.own)
	return figure{LostBeyond, "1", lost.Seconds() / float64(runtime.NumCPU())}
}

// released stops the burners and waits until nothing is in force any more.
func (r *blockioRig) released(ctx context.Context) (figure, error) {
	const patience = time.Minute
	if err := r.burn(0); err != nil {
		return figure{}, err
	}
	for start := time.Now(); ; {
		b, err := r.client.BlockIO(ctx, blockioName, 0)
		if err != nil {
			return figure{}, err
		}
		acted := slices.ContainsFunc(b.Rows, func(x api.BlockIORow) bool { return x.Action != "" })
		if took := time.Since(start); !acted || took > patience {
			return figure{ReleasedIn, "s", took.Seconds()}, nil
		}
		if err := sleep(ctx, blockioPoll); err != nil {
			return figure{}, err
		}
	}
}

// recovers waits until the agent declares interference and the load is back at its undisturbed
// figure. It returns how long each took, and the fraction of declarations that named a burner.
func (r *blockioRig) recovers(ctx context.Context, start time.Time) ([]figure, error) {
	recovered := blockioPatience
	before := r.board.Read()
	figures, _, err := r.detects(ctx, start, blockioPatience, func(detected bool) (done bool) {
		now := r.board.Read()
		w := now.Since(before)
		before = now
		if done = detected && w.Rate() >= 0.95*r.alone.Rate(); done {
			recovered = time.Since(start)
		}
		return done
	})
	return append(figures, figure{RecoveredIn, "s", min(recovered, blockioPatience).Seconds()}), err
}

// detects asks the agent in steps whether it has declared interference since start. It calls done
// with the answer after each step, and stops when done returns true or patience is over. It returns
// the time to the declaration and the fraction of declarations that named a burner as figures, and
// the moment of the declaration.
func (r *blockioRig) detects(ctx context.Context, start time.Time, patience time.Duration, done func(detected bool) bool) (figures []figure, at time.Time, err error) {
	detected := math.Inf(1)
	for time.Since(start) < patience {
		if err := sleep(ctx, blockioPoll); err != nil {
			return nil, at, err
		}
		if done(!math.IsInf(detected, 1)) {
			break
		}
		if !math.IsInf(detected, 1) {
			continue
		}
		found, named, right, err := r.declared(ctx, start)
		if err != nil {
			return nil, at, err
		}
		if named > 0 {
			detected = found
			figures = append(figures, figure{NamedRight, "1", float64(right) / float64(named)})
		}
	}
	detected = min(detected, blockioPatience.Seconds())
	return append(figures, figure{DetectedIn, "s", detected}), start.Add(time.Duration(detected * float64(time.Second))), nil
}

// declared returns the time from a moment to the agent's first declaration of interference, the
// number of declarations since, and how many of them named a burner.
func (r *blockioRig) declared(ctx context.Context, start time.Time) (after float64, named, right int, err error) {
	b, err := r.client.BlockIO(ctx, blockioName, 0)
	after = math.Inf(1)
	for _, x := range b.Events {
		if x.What == "interference" && x.Time.After(start) {
			after = min(after, x.Time.Sub(start).Seconds())
			if named++; strings.Contains(x.Text, blockioBurner) {
				right++
			}
		}
	}
	// Interference that was declared earlier and goes on is not a new event.
	for _, x := range b.Rows {
		if since := b.Taken.Sub(start); named == 0 && x.State == "interference" && since > time.Second {
			after, named = since.Seconds(), 1
			if strings.HasPrefix(x.By, blockioBurner) {
				right = 1
			}
		}
	}
	return after, named, right, err
}
