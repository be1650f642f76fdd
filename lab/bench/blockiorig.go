package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// blockioConfig describes a rig.
type blockioConfig struct {
	load    []string    // generator and flags of the load in the container with the reservation
	service rig.Service // a real server in place of load; "" is none
	burners int         // containers that compute
	streams int         // pairs of containers that send one another datagrams
	own     int         // processes that compute in the container with the reservation
	three   bool        // the containers of figure 8 in place of all these
	yield   bool        // neighbours yield to reservations
	oneKey  bool        // they do not: the only policy is the reservation
}

// blockioRig is a rig without networks, with a scratch file.
type blockioRig struct {
	bed
	config   blockioConfig
	dir      string   // of the scratch file and a database
	device   string   // the disk
	scratch  *os.File // that the load reads and writes
	db       *sandbox.Box
	board    *load.Board // of the load
	database *pgbench    // in place of board
	burners  []*rig.Generator
	own      []*rig.Generator
	tenants  []*tenant
	loads    []*rig.Generator // all of these

	// Of the current round: the load undisturbed, by its own count and at the disk, and the CPU
	// times beside the neighbours without help.
	alone    work
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
	if c.three {
		add("vm%d", len(threeLoads()))
		return all
	}
	all = append(all, rig.Container{Name: "db"})
	add(blockioBurner+"%d", c.burners+2*c.streams)
	return all
}

func (r *blockioRig) build(ctx context.Context) (err error) {
	c := r.config
	if r.rig, err = rig.New(rig.Config{Path: rig.Local, Containers: c.containers()}); err != nil {
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
	if r.guard, err = newGuard(ctx, r.rig, "", 0); err != nil {
		return err
	}
	r.guard.feature = "blockio"
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
	if c.three {
		err = r.startThree(ctx)
	} else {
		err = r.startLoads(ctx)
	}
	if err != nil {
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

// start starts a generator.
func (r *blockioRig) start(ctx context.Context, box *sandbox.Box, args ...string) (*rig.Generator, error) {
	g, err := r.rig.Start(ctx, box, args...)
	r.loads = append(r.loads, g)
	return g, err
}

// startLoads starts the load, and the neighbours' loads in a stopped state.
func (r *blockioRig) startLoads(ctx context.Context) error {
	c := r.config
	if c.service != "" {
		if err := r.startDatabase(ctx); err != nil {
			return err
		}
	} else if err := r.startLoad(ctx, c.load); err != nil {
		return err
	}
	for range c.own {
		g, err := r.start(ctx, r.db, "burn")
		if err != nil {
			return err
		}
		r.own = append(r.own, g)
		if err := g.Freeze(); err != nil {
			return err
		}
	}
	for i, box := range r.rig.Neighbours() {
		if i >= c.burners {
			break
		}
		if err := r.startBeside(ctx, box, "burn"); err != nil {
			return err
		}
	}
	return r.startStreams(ctx, r.rig.Neighbours()[c.burners:])
}

// startBeside starts a neighbour's generator, and stops it for now.
func (r *blockioRig) startBeside(ctx context.Context, box *sandbox.Box, args ...string) error {
	g, err := r.start(ctx, box, args...)
	if err != nil {
		return err
	}
	r.burners = append(r.burners, g)
	return g.Freeze()
}

// startLoad starts a generator in the container with the reservation.
func (r *blockioRig) startLoad(ctx context.Context, args []string) error {
	to := r.target()
	if args[0] == "mail" {
		if to = filepath.Join(r.dir, "mail"); os.Mkdir(to, 0o700) != nil {
			return fmt.Errorf("make %s", to)
		}
	}
	g, err := r.start(ctx, r.db, append(slices.Clone(args), "--to", to)...)
	if err == nil {
		r.board = g.Board
	}
	return err
}

// scratchSize is the size of the scratch file, in MiB. It lies on a real disk: a loop device would
// distort the result, because kernel threads do its work, they wait for the burners as well, and no
// container is charged for that wait.
const scratchSize = 256

func (r *blockioRig) close() error {
	err := errors.Join(rig.Stop(r.loads...), r.leave())
	if r.database != nil && r.database.log != nil {
		err = errors.Join(err, r.database.log.Close())
	}
	if r.scratch != nil {
		err = errors.Join(err, r.scratch.Close())
	}
	return err
}

// burn lets the first count burners run, and stops the others.
func (r *blockioRig) burn(count int) error {
	return errors.Join(signalAll(r.burners[:count], unix.SIGCONT), signalAll(r.burners[count:], unix.SIGSTOP))
}

// work is what the load did in a window, and the CPU times in it, per second.
type work struct {
	rate float64 // operations, or transactions, per second
	p99  time.Duration
	cpu  sideTimes
}

// window measures the load for the length of a window.
func (r *blockioRig) window(ctx context.Context, d time.Duration) (work, error) {
	return r.measured(ctx, func() error { return sleep(ctx, d) })
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
