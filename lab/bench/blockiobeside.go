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
	"github.com/fairlead-project/fairlead/lab/rig"
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

// monitored measures the cost of the monitor: without it, with empty programs at the same
// hooks, and with a reservation. It alternates between the three, because the machine
// drifts.
func (r *blockioRig) monitored(ctx context.Context, e *experiment, c blockioCase) error {
	const turns, empty = 4, "empty programs"
	var off, on, idle uint64
	var cpu time.Duration
	for range turns {
		w, err := r.window(ctx, e.take/2)
		if err != nil {
			return err
		}
		off += w.Ops
		links, err := rig.AttachEmpty("block_rq_issue", "block_rq_complete", "sched_switch", "sched_wakeup", "sched_wakeup_new")
		if err != nil {
			return err
		}
		w, err = r.window(ctx, e.take/2)
		if err := errors.Join(err, links.Close()); err != nil {
			return err
		}
		idle += w.Ops
		end, err := r.reserve(ctx, blockioName, api.BlockIOFigures{ReadIOPS: 1})
		if err != nil {
			return err
		}
		before := cpuTime(r.agent.PID)
		w, err = r.window(ctx, e.take/2)
		cpu += cpuTime(r.agent.PID) - before
		if err := errors.Join(err, end()); err != nil {
			return err
		}
		on += w.Ops
	}
	span := turns * (e.take / 2).Seconds()
	e.report.Add(c.name, DiskIOPS, "1/s", false, float64(off)/span)
	e.report.AddPeer(c.name, DiskIOPS, "1/s", empty, float64(idle)/span)
	e.report.Add(c.name, DiskIOPS, "1/s", true, float64(on)/span)
	e.report.Add(c.name, AgentPart, "1", true, cpu.Seconds()/span)
	return nil
}

// blockioPatience is the maximum time until a reservation is met again, blockioStep the
// interval between checks, and blockioSettle the time before a measurement.
const (
	blockioPatience = 10 * time.Second
	blockioStep     = 100 * time.Millisecond
	blockioSettle   = 500 * time.Millisecond
)

// beside is one round: the load undisturbed, beside the burners without protection, and
// beside them with a reservation.
func (r *blockioRig) beside(ctx context.Context, e *experiment, c blockioCase) error {
	alone, due, err := r.undisturbed(ctx, e.take)
	if err != nil {
		return err
	}
	if err := r.disturbed(ctx, e, c, alone, func(beside load.Window, work float64) { e.addBlockio(c, alone, beside, work, false) }); err != nil {
		return err
	}
	end, err := r.reserve(ctx, blockioName, due)
	if err != nil {
		return err
	}
	defer func() { end() }()                                  // a failure to end it shows below
	if err := sleep(ctx, 1500*time.Millisecond); err != nil { // the agent measures the load
		return err
	}
	start := time.Now()
	if err := r.burn(blockioBurners); err != nil {
		return err
	}
	if err := r.recovers(ctx, e, c, alone.Rate(), start); err != nil {
		return err
	}
	worked, used := r.burnt(), r.sideTimes()
	beside, err := r.window(ctx, e.take)
	if err != nil {
		return err
	}
	now := r.sideTimes()
	e.addBlockio(c, alone, beside, float64(r.burnt()-worked)/beside.Seconds, true)
	if !c.rig.oneKey {
		return r.burn(0)
	}
	e.addLost(c, r.unhelped, now.since(used))
	return r.released(ctx, e, c)
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

// addLost compares CPU times without help and with a reservation.
func (e *experiment) addLost(c blockioCase, off, on sideTimes) {
	lost := (off.neighbours - on.neighbours) - (on.own - off.own)
	e.report.Add(c.name, LostBeyond, "1", true, lost.Seconds()/float64(runtime.NumCPU()))
}

// released stops the burners and waits until nothing is in force any more.
func (r *blockioRig) released(ctx context.Context, e *experiment, c blockioCase) error {
	const patience = time.Minute
	if err := r.burn(0); err != nil {
		return err
	}
	for start := time.Now(); ; {
		b, err := r.client.BlockIO(ctx, blockioName, 0)
		if err != nil {
			return err
		}
		acted := slices.ContainsFunc(b.Rows, func(x api.BlockIORow) bool { return x.Action != "" })
		if took := time.Since(start); !acted || took > patience {
			e.report.Add(c.name, ReleasedIn, "s", true, took.Seconds())
			return nil
		}
		if err := sleep(ctx, blockioStep); err != nil {
			return err
		}
	}
}

// disturbed measures the load beside the burners, and then stops the burners.
func (r *blockioRig) disturbed(ctx context.Context, e *experiment, c blockioCase, alone load.Window, add func(beside load.Window, work float64)) error {
	if err := r.burn(len(r.burners)); err != nil {
		return err
	}
	if err := sleep(ctx, blockioSettle); err != nil {
		return err
	}
	worked, used := r.burnt(), r.sideTimes()
	beside, err := r.window(ctx, e.take)
	if err != nil {
		return err
	}
	r.unhelped = r.sideTimes().since(used)
	add(beside, float64(r.burnt()-worked)/beside.Seconds)
	return r.burn(0)
}

func (e *experiment) addBlockio(c blockioCase, alone, beside load.Window, work float64, on bool) {
	e.report.Add(c.name, PartOfIOPS, "1", on, beside.Rate()/alone.Rate())
	e.report.Add(c.name, TimesP99, "1", on, float64(beside.Latency(0.99))/float64(alone.Latency(0.99)))
	e.report.Add(c.name, BurnersKeep, "1/s", on, work)
}

// byAction is one round: the load beside the burners without protection, and with each action,
// which policy takes against all burners from the start.
func (r *blockioRig) byAction(ctx context.Context, e *experiment, c blockioCase) error {
	alone, err := r.window(ctx, e.take)
	if err != nil {
		return err
	}
	if err := r.disturbed(ctx, e, c, alone, func(beside load.Window, work float64) { e.addBlockio(c, alone, beside, work, false) }); err != nil {
		return err
	}
	for _, action := range []string{"idle", "quota"} {
		for i := range r.burners {
			set := api.SetRequest{Set: map[string]string{"fairlead.io.yield": action}}
			if _, err := r.client.Set(ctx, burnerName(i), set); err != nil {
				return err
			}
		}
		if err := r.disturbed(ctx, e, c, alone, func(beside load.Window, work float64) {
			e.report.AddPeer(c.name, PartOfIOPS, "1", action, beside.Rate()/alone.Rate())
			e.report.AddPeer(c.name, TimesP99, "1", action, float64(beside.Latency(0.99))/float64(alone.Latency(0.99)))
			e.report.AddPeer(c.name, BurnersKeep, "1/s", action, work)
		}); err != nil {
			return err
		}
		for i := range r.burners {
			if _, err := r.client.Set(ctx, burnerName(i), api.SetRequest{Unset: []string{"fairlead.io.yield"}}); err != nil {
				return err
			}
		}
	}
	return nil
}

// byBudget is one round of figure 6: the load beside the burners, without a budget for real-time
// and with growing budgets.
func (r *blockioRig) byBudget(ctx context.Context, e *experiment, c blockioCase) error {
	alone, err := r.window(ctx, e.take)
	if err != nil {
		return err
	}
	if err := r.disturbed(ctx, e, c, alone, func(beside load.Window, work float64) { e.addBlockio(c, alone, beside, work, false) }); err != nil {
		return err
	}
	for _, budget := range []string{"20ms", "50ms", "100ms", "200ms", "400ms"} {
		if _, err := r.client.Set(ctx, blockioName, api.SetRequest{Set: map[string]string{"fairlead.io.realtime": budget}}); err != nil {
			return err
		}
		if err := r.disturbed(ctx, e, c, alone, func(beside load.Window, work float64) {
			e.report.AddPeer(c.name, PartOfIOPS, "1", budget, beside.Rate()/alone.Rate())
			e.report.AddPeer(c.name, TimesP99, "1", budget, float64(beside.Latency(0.99))/float64(alone.Latency(0.99)))
			e.report.AddPeer(c.name, BurnersKeep, "1/s", budget, work)
		}); err != nil {
			return err
		}
	}
	_, err = r.client.Set(ctx, blockioName, api.SetRequest{Unset: []string{"fairlead.io.realtime"}})
	return err
}

// recovers waits until the agent declares interference and the load is back at its undisturbed
// figure. It reports how long each took, and the fraction of declarations that named a burner.
func (r *blockioRig) recovers(ctx context.Context, e *experiment, c blockioCase, alone float64, start time.Time) error {
	recovered := blockioPatience
	before := r.board.Read()
	_, err := r.detects(ctx, e, c, start, blockioPatience, func(detected bool) (done bool) {
		now := r.board.Read()
		w := now.Since(before)
		before = now
		if done = detected && w.Rate() >= 0.95*alone; done {
			recovered = time.Since(start)
		}
		return done
	})
	if err != nil {
		return err
	}
	e.report.Add(c.name, RecoveredIn, "s", true, min(recovered, blockioPatience).Seconds())
	return nil
}

// detects asks the agent in steps whether it has declared interference since start. It calls done
// with the answer after each step, and stops when done returns true or patience is over. It reports
// the time to the declaration and the fraction of declarations that named a burner, and returns the
// moment of the declaration.
func (r *blockioRig) detects(ctx context.Context, e *experiment, c blockioCase, start time.Time, patience time.Duration, done func(detected bool) bool) (at time.Time, err error) {
	detected := math.Inf(1)
	for time.Since(start) < patience {
		if err := sleep(ctx, blockioStep); err != nil {
			return at, err
		}
		if done(!math.IsInf(detected, 1)) {
			break
		}
		if !math.IsInf(detected, 1) {
			continue
		}
		found, named, right, err := r.declared(ctx, start)
		if err != nil {
			return at, err
		}
		if named > 0 {
			detected = found
			e.report.Add(c.name, NamedRight, "1", true, float64(right)/float64(named))
		}
	}
	detected = min(detected, blockioPatience.Seconds())
	e.report.Add(c.name, DetectedIn, "s", true, detected)
	return start.Add(time.Duration(detected * float64(time.Second))), nil
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

// scheduled is one round: the same load with each I/O scheduler of the loop device. Off is
// the scheduler none.
func (r *blockioRig) scheduled(ctx context.Context, e *experiment, c blockioCase) error {
	all, err := r.loop.Schedulers()
	if err != nil {
		return err
	}
	for _, name := range all {
		if err := r.loop.Schedule(name); err != nil {
			return err
		}
		if err := sleep(ctx, blockioStep); err != nil {
			return err
		}
		w, err := r.window(ctx, e.take)
		if err != nil {
			return err
		}
		if name == "none" {
			e.report.Add(c.name, DiskIOPS, "1/s", false, w.Rate())
			e.report.Add(c.name, DiskP99, "s", false, w.Latency(0.99).Seconds())
			continue
		}
		e.report.AddPeer(c.name, DiskIOPS, "1/s", name, w.Rate())
		e.report.AddPeer(c.name, DiskP99, "s", name, w.Latency(0.99).Seconds())
	}
	return nil
}
