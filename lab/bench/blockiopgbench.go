package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/lab/rig"
)

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
	dir := filepath.Join(r.dir, "postgres")
	if err := os.Mkdir(dir, 0o711); err != nil { // its user passes through
		return err
	}
	if _, err := rig.Postgres.Serve(ctx, r.db, dir); err != nil {
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
			err = errors.Join(r.database.Ended(), sleep(ctx, blockioPoll))
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
		if err := errors.Join(p.Ended(), sleep(ctx, blockioPoll/10)); err != nil {
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
