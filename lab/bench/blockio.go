package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// The metrics of the blockio experiment.
const (
	PartOfIOPS  = "IOPS, part of the undisturbed"
	TimesP99    = "p99 latency, times the undisturbed"
	DetectedIn  = "interference declared after"
	RecoveredIn = "95 % of the undisturbed after"
	NamedRight  = "burners among the culprits named"
	DiskIOPS    = "IOPS"
	Hits        = "losses detected"
	FalseAlarms = "false alarms"
	MetShare    = "1 s samples in which reservations are met"
	SettledIn   = "reservations met after a change"
	Refused     = "over-commitment refused"
	PartOfDue   = "part of the reservation"
	AgentPart   = "agent CPU while armed"
	// LostBeyond is the neighbours' loss minus the gain of the container with the reservation.
	// ReleasedIn is the time until all settings are restored after the neighbours have stopped.
	LostBeyond = "CPU time that neighbours lose beyond what it takes, part of all"
	ReleasedIn = "all put back after"
	// Transactions is the number of a database's transactions per second.
	Transactions       = "transactions"
	PartOfTransactions = "transactions, part of the undisturbed"
	// OfLabel compares a bound of real time with the reservation alone.
	OfLabel = "part of what the one label gives"
)

// armAlone is the undisturbed load, with which other arms are compared. armLabel is the reservation
// without the bound of a case.
const (
	armAlone arm = "alone"
	armLabel arm = "one label"
)

// blockioCase is one case: a rig, and the measurements of a round.
type blockioCase struct {
	name    string
	quick   bool
	needs   rig.Service // a further service beside the rig's; "": none
	most    int         // most rounds, for a case with long ones; 0: no limit
	rig     blockioConfig
	measure func(*blockioRig, context.Context, blockioCase, arm) ([]figure, error)
	// whole replaces measure: it measures all arms of a case at once and adds the figures.
	whole func(*blockioRig, context.Context, blockioCase) error
}

// arms returns the arms of each round, in order.
func (c blockioCase) arms() []arm {
	if c.whole != nil {
		return []arm{armAll}
	}
	if c.rig.bound != "" {
		return []arm{armAlone, armOff, armLabel, armOn}
	}
	return append([]arm{armAlone}, offOn()...)
}

// blockioBurners is the number of neighbours that compute all the time, each in a separate
// container (MIST, figure 5).
const blockioBurners = 12

func blockioCatalogue() []blockioCase {
	reads := func(depth int) []string {
		return []string{"disk", "--size", "4096", "--conns", strconv.Itoa(depth)}
	}
	cpus := runtime.NumCPU()
	// MIST's figure 7: the mix of Hotmail's INDEX, from 4 threads.
	hotmail := []string{"disk", "--size", "4096", "--also", "65536", "--sequential", "reads", "--writes", "25", "--conns", "4"}
	return []blockioCase{
		{name: "12 burners, depth 1", quick: true, rig: blockioConfig{load: reads(1), burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "12 burners, depth 16", rig: blockioConfig{load: reads(16), burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "12 burners, Hotmail mix", rig: blockioConfig{load: hotmail, burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "12 burners, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, yield: true}, measure: (*blockioRig).beside},
		{name: "one key, depth 1", quick: true, most: 3, rig: blockioConfig{load: reads(1), burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "one key, depth 16", most: 3, rig: blockioConfig{load: reads(16), burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "one key, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "one key, SQLite", needs: "sqlite3", most: 3, rig: blockioConfig{load: []string{"sqlite"}, burners: blockioBurners, oneKey: true}, measure: (*blockioRig).beside},
		{name: "two keys, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, oneKey: true, tenants: [][]string{reads(1)}}, measure: (*blockioRig).beside},
		{name: "400 ms, pgbench", most: 3, rig: blockioConfig{service: rig.Postgres, burners: blockioBurners, oneKey: true, bound: "400ms"}, measure: (*blockioRig).beside},
		{name: "detect, 1 thread", quick: true, most: 3, rig: blockioConfig{load: reads(1), burners: blockioBurners, own: 2 * cpus}, whole: (*blockioRig).detect},
		{name: fmt.Sprintf("detect, %d threads", 4*cpus), most: 3, rig: blockioConfig{load: reads(4 * cpus), burners: blockioBurners, own: 2 * cpus}, whole: (*blockioRig).detect},
		{name: "three containers", quick: true, most: 3, rig: blockioConfig{tenants: threeLoads(), yield: true}, whole: (*blockioRig).three},
		{name: "mail beside streams", quick: true, rig: blockioConfig{load: []string{"mail", "--size", "16384", "--conns", "16"}, burners: 8, streams: 2}, measure: (*blockioRig).mail},
		{name: "monitor, depth 1", quick: true, rig: blockioConfig{load: reads(1)}, whole: (*blockioRig).monitored},
		{name: "monitor, depth 16", rig: blockioConfig{load: reads(16)}, whole: (*blockioRig).monitored},
	}
}

// blockioPlans measure a load on a disk beside containers that compute, or use the network or the
// same disk, without protection and with a reservation. They are the experiments of the MIST paper,
// scaled to this machine. Each case has a separate rig.
func blockioPlans(e *experiment, _ Options) (plans []plan) {
	for _, c := range blockioCatalogue() {
		r := &blockioRig{bed: bed{experiment: e}, config: c.rig}
		rounds := series{inOrder: true, rounds: e.report.Rounds}
		if c.most > 0 {
			rounds.rounds = min(rounds.rounds, c.most)
			if e.report.Env.Quick {
				rounds.rounds = 1
			}
		}
		rounds.cases = []armed{{name: c.name, quick: c.quick, needs: cmp.Or(c.rig.service, c.needs), arms: c.arms(), measure: func(ctx context.Context, a arm) ([]figure, error) {
			if a == armAll {
				return nil, c.whole(r, ctx, c)
			}
			return c.measure(r, ctx, c, a)
		}}}
		plans = append(plans, plan{name: c.name, rigged: r, series: []series{rounds}})
	}
	return plans
}

// blockioConfig describes a rig.
type blockioConfig struct {
	load    []string    // generator and flags of the load in the container with the reservation
	service rig.Service // a real server in place of load; "" is none
	burners int         // containers that compute
	streams int         // pairs of containers that send one another datagrams
	own     int         // processes that compute in the container with the reservation
	tenants [][]string  // loads of further containers with reservations
	yield   bool        // neighbours yield to reservations
	oneKey  bool        // neighbours have no label: the only policy is the reservation
	bound   string      // io.realtime, which bounds the real time of help; "": none
}

// part is the metric of the remaining work.
func (c blockioConfig) part() string {
	if c.service != "" {
		return PartOfTransactions
	}
	return PartOfIOPS
}

// blockioRig is a rig without networks, with a scratch file.
type blockioRig struct {
	bed
	config   blockioConfig
	dir      string   // directory of the scratch file and a database
	device   string   // disk
	scratch  *os.File // file that the load reads and writes
	db       *sandbox.Box
	board    *load.Board // of the load
	database *pgbench    // in place of board
	burners  []*rig.Generator
	own      []*rig.Generator
	tenants  []*tenant

	// Of the current round: the load undisturbed, by its own count and at the disk, by the one
	// label, and the CPU times beside the neighbours without help.
	alone    work
	labelled float64
	due      api.BlockIOFigures
	unhelped sideTimes
}

// blockioBurner begins the names of the neighbours in the rig.
const blockioBurner = "burner-"

// containers are the containers of the rig: the one with the reservation, the others that compute,
// and pairs that send.
func (c blockioConfig) containers() (all []rig.Container) {
	add := func(format string, n int) {
		for i := range n {
			all = append(all, rig.Container{Name: fmt.Sprintf(format, i)})
		}
	}
	if c.service != "" || len(c.load) > 0 {
		all = append(all, rig.Container{Name: "db"})
	}
	add(blockioBurner+"%d", c.burners+2*c.streams)
	add("vm%d", len(c.tenants))
	return all
}

func (r *blockioRig) build(ctx context.Context) (err error) {
	c := r.config
	if err := r.raise(ctx, rig.Config{Path: rig.Local, Containers: c.containers()}, "blockio", "", 0); err != nil {
		return err
	}
	r.db = r.rig.Boxes[0]
	if r.dir, err = r.rig.TempDir("disk"); err != nil {
		return err
	}
	if r.scratch, err = block.Scratch(ctx, r.dir, scratchSize); err != nil {
		return err
	}
	disk, err := block.Holding(kernel.Default().Sys, r.dir)
	if err != nil {
		return fmt.Errorf("%w (TMPDIR says where)", err)
	}
	r.device = "/dev/" + disk.Name
	var set rules
	switch {
	case c.own > 0: // measure what would be done, and to which containers
		set = rules{"*": "io.help: off"}
	case c.streams > 0:
		set = rules{"*": "io.yield: auto, io.interrupts: auto"}
	case c.yield:
		set = rules{"*": "io.yield: auto"}
	}
	if err := r.guard.apply(ctx, set); err != nil {
		return err
	}
	if err := r.startLoads(ctx); err != nil {
		return err
	}
	if err := r.guard.wait(ctx, func(_ api.Container, s api.FeatureStatus) bool { return s.State == api.StateDone }); err != nil {
		return err
	}
	_, err = r.guard.client.SetCapacity(ctx, api.CapacityRequest{Device: r.device, BlockIOFigures: api.BlockIOFigures{
		ReadIOPS: 10_000_000, WriteIOPS: 10_000_000, ReadBytes: 1 << 40, WriteBytes: 1 << 40,
	}})
	return err
}

// target is the path of the scratch file.
func (r *blockioRig) target() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), r.scratch.Fd())
}

// startLoads starts the load, and the neighbours' loads in a stopped state.
func (r *blockioRig) startLoads(ctx context.Context) error {
	c := r.config
	if c.service != "" {
		if err := r.startDatabase(ctx); err != nil {
			return err
		}
	} else if len(c.load) > 0 {
		if err := r.startLoad(ctx, c.load); err != nil {
			return err
		}
	}
	for range c.own {
		if err := r.startFrozen(ctx, &r.own, r.db, "burn"); err != nil {
			return err
		}
	}
	for _, box := range r.rig.Neighbours()[:c.burners] {
		if err := r.startFrozen(ctx, &r.burners, box, "burn"); err != nil {
			return err
		}
	}
	for i, args := range c.tenants {
		box := r.rig.Boxes[len(r.rig.Boxes)-len(c.tenants)+i]
		g, err := r.rig.Start(ctx, box, append(slices.Clone(args), "--to", r.target())...)
		if err != nil {
			return err
		}
		r.tenants = append(r.tenants, &tenant{name: box.Name, board: g.Board})
	}
	return r.startStreams(ctx, r.rig.Neighbours()[c.burners:][:2*c.streams])
}

// startFrozen starts a generator, stops it for now, and adds it to a list.
func (r *blockioRig) startFrozen(ctx context.Context, to *[]*rig.Generator, box *sandbox.Box, args ...string) error {
	g, err := r.rig.Start(ctx, box, args...)
	if err != nil {
		return err
	}
	*to = append(*to, g)
	return g.Freeze()
}

// startLoad starts a generator in the container with the reservation.
func (r *blockioRig) startLoad(ctx context.Context, args []string) error {
	to := r.target()
	if args[0] != "disk" {
		if to = filepath.Join(r.dir, args[0]); os.Mkdir(to, 0o700) != nil {
			return fmt.Errorf("make %s", to)
		}
	}
	g, err := r.rig.Start(ctx, r.db, append(slices.Clone(args), "--to", to)...)
	if err == nil {
		r.board = g.Board
	}
	return err
}

// scratchSize is the size of the scratch file, in MiB. The file is on a real disk. A loop device would
// distort the result: kernel threads do its work, these also wait for the burners, and that wait is
// charged to no container.
const scratchSize = 256

func (r *blockioRig) close() error {
	err := r.leave()
	if r.database != nil && r.database.log != nil {
		err = errors.Join(err, r.database.log.Close())
	}
	if r.scratch != nil {
		err = errors.Join(err, r.scratch.Close())
	}
	return err
}

// work holds the work of the load in a window, and the CPU times, per second.
type work struct {
	rate float64 // operations, or transactions, per second
	p99  time.Duration
	cpu  sideTimes
}

// window measures the load for the length of a window.
func (r *blockioRig) window(ctx context.Context, d time.Duration) (work, error) {
	return r.measured(ctx, func() error { sleep(ctx, d); return nil })
}

// measured measures the load while during runs.
func (r *blockioRig) measured(ctx context.Context, during func() error) (w work, err error) {
	var before load.Reading
	if r.board != nil {
		before = r.board.Read()
	}
	used := r.sideTimes()
	if err := during(); err != nil {
		return w, err
	}
	w.cpu = r.sideTimes().since(used)
	if r.database != nil {
		w.rate, w.p99, err = r.database.during(ctx, span{used.taken, w.cpu.taken})
		return w, err
	}
	done := r.board.Read().Since(before)
	w.rate, w.p99 = done.Rate(), done.Latency(0.99)
	return w, nil
}
