package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// reserve makes a reservation, and returns a function that ends it.
func (r *blockioRig) reserve(ctx context.Context, name string, f api.BlockIOFigures) (end func() error, err error) {
	x, err := r.guard.client.Reserve(ctx, api.ReservationRequest{Container: name, Device: r.device, BlockIOFigures: f})
	if err != nil {
		return nil, err
	}
	return func() error {
		_, err := r.guard.client.DeleteReservation(context.WithoutCancel(ctx), x.ID)
		return err
	}, nil
}

// achieved measures a container's throughput at the disk.
func (r *blockioRig) achieved(ctx context.Context, name string, over time.Duration) (row api.BlockIORow, err error) {
	b, err := r.guard.client.BlockIO(ctx, name, over)
	for _, x := range b.Rows {
		if "/dev/"+x.Disk == r.device {
			return x, err
		}
	}
	return row, errors.Join(err, fmt.Errorf("%s does nothing at %s", name, r.device))
}

// undisturbed measures the load, and its throughput at the disk in the same window.
func (r *blockioRig) undisturbed(ctx context.Context, over time.Duration) (w work, at api.BlockIOFigures, err error) {
	w, err = r.measured(ctx, func() error {
		row, err := r.achieved(ctx, r.db.Name, over)
		at = row.Achieved
		return err
	})
	if err == nil && w.rate == 0 {
		err = errors.New("the load does nothing")
	}
	return w, at, err
}

// monitored measures the cost of the monitor: the load without it, and with a reservation that is
// met. It alternates between the two, because the machine drifts.
func (r *blockioRig) monitored(ctx context.Context, c blockioCase) error {
	const turns = 4
	var off, on float64
	var cpu time.Duration
	without := func() error {
		w, err := r.window(ctx, r.take/4)
		off += w.rate / (2 * turns)
		return err
	}
	for range turns {
		if err := without(); err != nil {
			return err
		}
		end, err := r.reserve(ctx, r.db.Name, api.BlockIOFigures{ReadIOPS: 1})
		if err != nil {
			return err
		}
		sleep(ctx, blockioFirst)
		before := cpuTime(r.guard.process.PID)
		w, err := r.window(ctx, r.take/2)
		cpu += cpuTime(r.guard.process.PID) - before
		on += w.rate / turns
		if err := errors.Join(err, end(), without()); err != nil {
			return err
		}
	}
	r.add(c.name, armOff, figure{DiskIOPS, "1/s", off})
	r.add(c.name, armOn, figure{DiskIOPS, "1/s", on}, figure{AgentPart, "1", cpu.Seconds() / (turns * r.take / 2).Seconds()})
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
	take := r.take
	if c.rig.service != "" {
		take *= 2 // the last of a hundred transactions
	}
	if c.rig.bound != "" {
		set := rules{}
		if a == armOn {
			set["db"] = "io.realtime: " + c.rig.bound
		}
		if err := r.guard.apply(ctx, set); err != nil {
			return nil, err
		}
	}
	switch a {
	case armAlone:
		if r.alone, r.due, err = r.undisturbed(ctx, take); err != nil {
			return nil, err
		}
		for _, t := range r.tenants {
			row, err := r.achieved(ctx, t.name, take)
			if err != nil {
				return nil, err
			}
			t.alone = row.Achieved
		}
		return r.transactions(r.alone), nil
	case armOff:
		w, err := r.disturbed(ctx, blockioSettle, take)
		r.unhelped = w.cpu
		return r.kept(w), err
	}
	end, err := r.reserve(ctx, r.db.Name, r.due)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	for _, t := range r.tenants {
		end, err := r.reserve(ctx, t.name, t.alone)
		if err != nil {
			return nil, err
		}
		defer end()
	}
	sleep(ctx, 1500*time.Millisecond) // the agent measures the load
	start := time.Now()
	if err := letRun(r.burners, len(r.burners)); err != nil {
		return nil, err
	}
	if figures, err = r.recovers(ctx, start); err != nil {
		return nil, err
	}
	before := r.readings()
	w, err := r.window(ctx, take)
	if err != nil {
		return nil, err
	}
	figures = append(figures, r.kept(w)...)
	for i, now := range r.readings() {
		due := r.tenants[i].alone
		figures = append(figures, figure{PartOfDue, "1", now.Since(before[i]).Rate() / float64(due.ReadIOPS+due.WriteIOPS)})
	}
	switch {
	case a == armLabel:
		r.labelled = w.rate
	case c.rig.bound != "":
		figures = append(figures, figure{OfLabel, "1", w.rate / r.labelled})
	}
	if !c.rig.oneKey || len(r.tenants) > 0 { // who has a reservation as well stays in the way
		return figures, letRun(r.burners, 0)
	}
	released, err := r.released(ctx)
	return append(figures, r.lost(w.cpu), released), err
}

// disturbed measures the load beside all neighbours, which it then stops.
func (r *blockioRig) disturbed(ctx context.Context, settle, take time.Duration) (w work, err error) {
	if err := letRun(r.burners, len(r.burners)); err != nil {
		return w, err
	}
	sleep(ctx, settle)
	w, err = r.window(ctx, take)
	return w, errors.Join(err, letRun(r.burners, 0))
}

// kept returns how much of the undisturbed load is left beside the neighbours.
func (r *blockioRig) kept(w work) []figure {
	return append(r.transactions(w), figure{r.config.part(), "1", w.rate / r.alone.rate}, r.longer(w))
}

// transactions returns what a database did; nothing of another load.
func (r *blockioRig) transactions(w work) []figure {
	if r.database == nil {
		return nil
	}
	return []figure{{Transactions, "1/s", w.rate}, {P99, "s", w.p99.Seconds()}}
}

func (r *blockioRig) longer(w work) figure {
	return figure{TimesP99, "1", w.p99.Seconds() / r.alone.p99.Seconds()}
}

// sideTimes is the CPU time of the container with the reservation, and of its neighbours.
type sideTimes struct {
	taken           time.Time
	own, neighbours time.Duration
}

func (r *blockioRig) sideTimes() sideTimes {
	t := sideTimes{taken: time.Now(), own: usage(r.db)}
	for _, b := range r.rig.Neighbours() {
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
	if err := letRun(r.burners, 0); err != nil {
		return figure{}, err
	}
	for start := time.Now(); ; {
		b, err := r.guard.client.BlockIO(ctx, r.db.Name, 0)
		if err != nil {
			return figure{}, err
		}
		acted := slices.ContainsFunc(b.Rows, func(x api.BlockIORow) bool { return x.Action != "" })
		if took := time.Since(start); !acted || took > patience {
			return figure{ReleasedIn, "s", took.Seconds()}, nil
		}
		sleep(ctx, blockioPoll)
	}
}

// recovers waits until the agent declares interference and the load is back at its undisturbed
// figure. It returns how long each took, and the fraction of declarations that named a burner.
func (r *blockioRig) recovers(ctx context.Context, start time.Time) (figures []figure, err error) {
	step := blockioPoll
	if r.database != nil {
		step = blockioSettle // in which enough transactions end
	}
	detected, recovered := blockioPatience.Seconds(), blockioPatience.Seconds()
	for found := false; time.Since(start) < blockioPatience; {
		w, err := r.window(ctx, step)
		if err != nil {
			return nil, err
		}
		if found && w.rate >= 0.95*r.alone.rate {
			recovered = min(recovered, w.cpu.taken.Sub(start).Seconds())
			break
		}
		if found {
			continue
		}
		after, named, right, err := r.declared(ctx, start)
		if err != nil {
			return nil, err
		}
		if found = named > 0; found {
			detected = min(detected, after)
			figures = append(figures, figure{NamedRight, "1", float64(right) / float64(named)})
		}
	}
	return append(figures, figure{DetectedIn, "s", detected}, figure{RecoveredIn, "s", recovered}), nil
}

// declared returns the time from a moment to the agent's first declaration of interference, the
// number of declarations since, and how many of them named a burner.
func (r *blockioRig) declared(ctx context.Context, start time.Time) (after float64, named, right int, err error) {
	b, err := r.guard.client.BlockIO(ctx, r.db.Name, 0)
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
			if strings.Contains(x.By, blockioBurner) {
				right = 1
			}
		}
	}
	return after, named, right, err
}

// dueOfMail is the reservation of the mail server, as a fraction of its undisturbed throughput. It
// is more than in MIST's figure 9 (3000 of 4000 to 6000), because the neighbours here leave the
// mail server three quarters of its throughput, and MIST's left it less than 3000.
const dueOfMail = 0.85

// mail is figure 9: a mail server alone, beside containers that decode and send streams, and beside
// them with a reservation.
func (r *blockioRig) mail(ctx context.Context, _ blockioCase, a arm) (_ []figure, err error) {
	settle := blockioSettle
	switch a {
	case armAlone:
		r.alone, r.due, err = r.undisturbed(ctx, 2*r.take)
		return nil, err
	case armOn:
		settle = 5 * time.Second
		// The kernel merges several blocks into one request, and the reservation counts requests.
		end, err := r.reserve(ctx, r.db.Name, scaled(api.BlockIOFigures{ReadIOPS: r.due.ReadIOPS, WriteIOPS: r.due.WriteIOPS}, dueOfMail))
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, end()) }()
	}
	w, err := r.disturbed(ctx, settle, r.take)
	if err != nil {
		return nil, err
	}
	return []figure{{PartOfDue, "1", w.rate / (dueOfMail * r.alone.rate)}, r.longer(w)}, nil
}

// pgbench is 4 clients that write to a database. It fits into memory, so a transaction waits for
// the disk at its commit.
const (
	pgbenchClients = 4
	pgbenchScale   = 4 // at least the clients, or they wait for one another's rows
)

// pgbench is the program in the container with the reservation, and its log.
type pgbench struct {
	*rig.Generator
	log  *os.File // read up to the last whole line
	done transactions
}

// startDatabase starts PostgreSQL in the container with the reservation, with its data on
// the disk of the scratch file, fills the tables of pgbench, and starts that.
func (r *blockioRig) startDatabase(ctx context.Context) error {
	if _, err := r.rig.Serve(ctx, rig.Postgres, r.db); err != nil {
		return err
	}
	program := func(args ...string) *exec.Cmd {
		return exec.Command(filepath.Join(filepath.Dir(rig.Postgres.Program()), "pgbench"),
			append([]string{"--host", "127.0.0.1", "--port", rig.Port, "--username", "postgres", "--no-vacuum"}, append(args, "postgres")...)...)
	}
	if err := r.db.Run(ctx, program("--initialize", "--quiet", "--scale", strconv.Itoa(pgbenchScale))); err != nil {
		return err
	}
	log := filepath.Join(r.dir, "transactions")
	p, err := r.db.Start(program("--time", "86400", "--client", strconv.Itoa(pgbenchClients), "--log", "--log-prefix", log))
	if err != nil {
		return err
	}
	r.database = &pgbench{Generator: &rig.Generator{Process: p}}
	for r.database.log == nil {
		if r.database.log, err = os.Open(fmt.Sprintf("%s.%d", log, p.PID)); errors.Is(err, os.ErrNotExist) {
			sleep(ctx, blockioPoll)
			err = errors.Join(r.database.Ended(), ctx.Err())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// during returns the transactions of a span, as in does, once pgbench has logged a later one. It
// writes its log in blocks. If it logs nothing for long, no transaction ends.
func (p *pgbench) during(ctx context.Context, s span) (rate float64, p99 time.Duration, err error) {
	for start := time.Now(); (len(p.done) == 0 || p.done[len(p.done)-1].end.Before(s.to)) && time.Since(start) < blockioPatience; {
		sleep(ctx, blockioPoll/10)
		if err := errors.Join(p.Ended(), ctx.Err()); err != nil {
			return 0, 0, err
		}
		data, err := io.ReadAll(p.log)
		if err != nil {
			return 0, 0, err
		}
		whole := bytes.LastIndexByte(data, '\n') + 1
		if _, err := p.log.Seek(int64(whole-len(data)), io.SeekCurrent); err != nil {
			return 0, 0, err
		}
		more, err := parseTransactions(bytes.NewReader(data[:whole]))
		if err != nil {
			return 0, 0, err
		}
		p.done = append(p.done, more...)
	}
	rate, p99 = p.done.in(s)
	return rate, p99, nil
}

// span is a window of time in which transactions are counted.
type span struct{ from, to time.Time }

// transactions are the transactions in pgbench's log.
type transactions []transaction

type transaction struct {
	end  time.Time
	took time.Duration
}

// parseTransactions reads pgbench's log (pgbench(1), "Per-Transaction Logging"): client_id
// transaction_no time script_no time_epoch time_us, times in microseconds.
func parseTransactions(log io.Reader) (all transactions, err error) {
	s := bufio.NewScanner(log)
	for s.Scan() {
		var client, number, script int
		var took, epoch, us int64
		if _, err := fmt.Sscan(s.Text(), &client, &number, &took, &script, &epoch, &us); err != nil {
			return nil, fmt.Errorf("pgbench logs %q: %w", s.Text(), err)
		}
		all = append(all, transaction{time.Unix(epoch, us*1000), time.Duration(took) * time.Microsecond})
	}
	return all, s.Err()
}

// in returns how many transactions ended in each second of a span, and the 99th percentile
// of their latency: the length of the span if there were none.
func (all transactions) in(s span) (rate float64, p99 time.Duration) {
	var took []time.Duration
	for _, t := range all {
		if !t.end.Before(s.from) && t.end.Before(s.to) {
			took = append(took, t.took)
		}
	}
	length := s.to.Sub(s.from)
	if len(took) == 0 {
		return 0, length
	}
	slices.Sort(took)
	return float64(len(took)) / length.Seconds(), took[min(len(took)*99/100, len(took)-1)]
}
