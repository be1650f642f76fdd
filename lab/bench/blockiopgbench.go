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
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/rig"
)

// pgbench is 4 clients that write to a database. It fits into memory, so a transaction waits for
// the disk at its commit.
const (
	pgbenchClients = 4
	pgbenchScale   = 4 // at least the clients, or they wait for one another's rows
	// pgbenchStart is the time from the start of pgbench until its load has settled.
	// pgbenchRecovers is how long a reservation must be met again.
	pgbenchStart    = time.Second
	pgbenchRecovers = 5 * time.Second
)

// startDatabase starts PostgreSQL in the container with the reservation, with its data on
// the disk of the scratch file, and fills the tables of pgbench.
func (r *blockioRig) startDatabase(ctx context.Context) error {
	dir := filepath.Join(r.dir, "postgres")
	if err := errors.Join(os.Mkdir(dir, 0o711), os.Chmod(r.dir, 0o711)); err != nil { // its user passes through
		return err
	}
	if _, err := rig.Postgres.Serve(ctx, r.db, dir); err != nil {
		return err
	}
	return r.pgbench(ctx, func() error { return nil }, "--initialize", "--quiet", "--scale", strconv.Itoa(pgbenchScale))
}

// pgbench runs pgbench in the container with the reservation, until it ends by itself. It calls
// during meanwhile, and ends pgbench if during fails.
func (r *blockioRig) pgbench(ctx context.Context, during func() error, args ...string) error {
	cmd := exec.Command(filepath.Join(filepath.Dir(rig.Postgres.Program()), "pgbench"),
		append([]string{"--host", "127.0.0.1", "--port", rig.Port, "--username", "postgres"}, append(args, "postgres")...)...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	p, err := r.db.Start(cmd)
	if err != nil {
		return err
	}
	err = during()
	if err != nil {
		p.Kill()
	}
	select {
	case <-ctx.Done():
		p.Kill()
		<-p.Done()
		return ctx.Err()
	case <-p.Done():
	}
	if failed := p.Wait(); err == nil && failed != nil {
		return fmt.Errorf("pgbench: %w: %s", failed, strings.TrimSpace(said.String()))
	}
	return err
}

// span is a window of time in which transactions are counted.
type span struct{ from, to time.Time }

// transacting runs pgbench for at least the duration of during, which is at most lasts, and returns
// its transactions.
func (r *blockioRig) transacting(ctx context.Context, lasts time.Duration, during func() error) (transactions, error) {
	const more = time.Second // what during takes in addition to its waits
	seconds := int(math.Ceil((lasts + more).Seconds()))
	return r.logged(ctx, during, "--time", strconv.Itoa(seconds))
}

// logged runs pgbench for the duration that the arguments length set, and returns its transactions.
func (r *blockioRig) logged(ctx context.Context, during func() error, length ...string) (transactions, error) {
	log := filepath.Join(r.dir, "transactions")
	err := r.pgbench(ctx, during, append(length, "--no-vacuum", "--client", strconv.Itoa(pgbenchClients), "--log", "--log-prefix", log)...)
	files, _ := filepath.Glob(log + ".*")
	var all transactions
	for _, file := range files {
		f, oerr := os.Open(file)
		if oerr != nil {
			return nil, errors.Join(err, oerr)
		}
		list, perr := parseTransactions(f)
		err = errors.Join(err, perr, f.Close(), os.Remove(file))
		all = append(all, list...)
	}
	return all, err
}

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

// reaches returns the end of the first step of a span with at least the given rate; false if there
// is none.
func (all transactions) reaches(rate float64, s span, step time.Duration) (time.Time, bool) {
	for from := s.from; !from.Add(step).After(s.to); from = from.Add(step) {
		if got, _ := all.in(span{from, from.Add(step)}); got >= rate {
			return from.Add(step), true
		}
	}
	return time.Time{}, false
}

// commits is what a database does in a second, and the 99th percentile of its latency.
type commits struct {
	rate float64
	p99  time.Duration
}

// database is one arm, as those of beside: pgbench undisturbed, beside the burners without
// protection, or beside them with a reservation.
func (r *blockioRig) database(ctx context.Context, c blockioCase, a arm) (figures []figure, err error) {
	take := 2 * r.take // the last of a hundred
	if a == armAlone {
		return r.databaseAlone(ctx, take)
	}
	var window span
	var w loaded
	burning := func() (err error) {
		window.from = time.Now()
		w, err = r.loaded(ctx, take)
		window.to = time.Now()
		return errors.Join(err, r.burn(0))
	}
	kept := func(all transactions) []figure {
		rate, p99 := all.in(window)
		return []figure{
			{Transactions, "1/s", rate}, {P99, "s", p99.Seconds()}, {PartOfTransactions, "1", rate / r.commits.rate},
			{TimesP99, "1", p99.Seconds() / r.commits.p99.Seconds()},
		}
	}
	if a == armOff {
		all, err := r.transacting(ctx, pgbenchStart+blockioSettle+take, func() error {
			if err := errors.Join(sleep(ctx, pgbenchStart), r.burn(len(r.burners)), sleep(ctx, blockioSettle)); err != nil {
				return err
			}
			return burning()
		})
		r.unhelped = w.cpu
		return kept(all), err
	}
	end, err := r.reserve(ctx, blockioName, r.due)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	var start, found time.Time
	all, err := r.transacting(ctx, 2*pgbenchStart+pgbenchRecovers+take, func() (err error) {
		if err := sleep(ctx, 2*pgbenchStart); err != nil { // the agent measures the load
			return err
		}
		start = time.Now()
		if err := r.burn(len(r.burners)); err != nil {
			return err
		}
		if figures, found, err = r.detects(ctx, start, pgbenchRecovers, func(detected bool) bool { return detected }); err != nil {
			return err
		}
		if err := sleep(ctx, time.Until(start.Add(pgbenchRecovers))); err != nil {
			return err
		}
		return burning()
	})
	if err != nil {
		return nil, err
	}
	recovered := blockioPatience
	if at, ok := all.reaches(0.95*r.commits.rate, span{found, window.to}, blockioSettle); ok {
		recovered = at.Sub(start)
	}
	figures = append(append(figures, kept(all)...), figure{RecoveredIn, "s", recovered.Seconds()})
	if !c.rig.oneKey {
		return figures, nil
	}
	released, err := r.released(ctx)
	return append(figures, r.lost(w.cpu), released), err
}

// databaseAlone measures pgbench undisturbed, and its throughput at the disk.
func (r *blockioRig) databaseAlone(ctx context.Context, take time.Duration) ([]figure, error) {
	var window span
	all, err := r.transacting(ctx, pgbenchStart+take, func() error {
		if err := sleep(ctx, pgbenchStart); err != nil {
			return err
		}
		window.from = time.Now()
		row, err := r.achieved(ctx, blockioName, take)
		window.to = time.Now()
		r.due = row.Achieved
		return err
	})
	if err != nil {
		return nil, err
	}
	r.commits.rate, r.commits.p99 = all.in(window)
	if r.commits.rate == 0 {
		return nil, errors.New("pgbench does nothing")
	}
	return []figure{{Transactions, "1/s", r.commits.rate}, {P99, "s", r.commits.p99.Seconds()}}, nil
}
