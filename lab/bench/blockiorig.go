package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
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

// blockioRig is a host of sandboxes with a scratch file and an agent.
type blockioRig struct {
	*experiment
	daemon
	config    blockioConfig
	sandboxes *sandbox.Host
	node      *sandbox.Box // the agent's namespace
	device    string       // the disk
	scratch   *os.File     // that the load reads and writes
	target    string       // its path
	db        *sandbox.Box
	board     *load.Board // of the load
	database  *pgbench    // in place of board
	burners   []*sandbox.Process
	boxes     []*sandbox.Box // the neighbours' sandboxes
	own       []*sandbox.Process
	tenants   []*tenant
	boards    []*load.Board // of all others

	// Of the current round: the load undisturbed, by its own count and at the disk, and the CPU
	// times beside the neighbours without help.
	alone    work
	due      api.BlockIOFigures
	unhelped sideTimes
}

// blockioName is the name of the container with the reservation. blockioBurner is the
// prefix of the others' names.
const (
	blockioName   = "blockio-db"
	blockioBurner = "blockio-burner-"
)

func burnerName(i int) string { return blockioBurner + strconv.Itoa(i) }

func (r *blockioRig) build(ctx context.Context) (err error) {
	if r.dir, err = os.MkdirTemp("", "fairlead-blockio-"); err != nil {
		return err
	}
	if _, err := sandbox.Sweep(kernel.Default(), filepath.Join(r.dir, "sandboxes")); err != nil {
		return err
	}
	if r.scratch, err = block.Scratch(ctx, r.dir, scratchSize); err != nil {
		return err
	}
	r.target = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), r.scratch.Fd())
	disk, err := block.Holding(kernel.Default().Sys, r.dir)
	if err != nil {
		return fmt.Errorf("%w (TMPDIR says where)", err)
	}
	r.device = "/dev/" + disk.Name
	if r.sandboxes, err = sandbox.New(sandbox.Config{Dir: filepath.Join(r.dir, "sandboxes")}); err != nil {
		return err
	}
	if r.node, err = r.sandboxes.Create(sandbox.Spec{Name: "blockio-node", Bare: true}); err != nil {
		return err
	}
	if err := r.startAgent(); err != nil {
		return err
	}
	c := r.config
	if c.three {
		if err := r.startThree(ctx); err != nil {
			return err
		}
		return r.known(ctx, len(r.tenants))
	}
	if err := r.startLoads(ctx, c); err != nil {
		return err
	}
	if err := lighten(r.db); err != nil {
		return err
	}
	return r.known(ctx, 1+c.burners+2*c.streams)
}

// startLoads starts the load, and the neighbours' loads in a stopped state.
func (r *blockioRig) startLoads(ctx context.Context, c blockioConfig) (err error) {
	if r.db, err = r.sandboxes.Create(sandbox.Spec{Name: blockioName}); err != nil {
		return err
	}
	if c.service != "" {
		err = r.startDatabase(ctx)
	} else {
		err = r.startLoad(ctx, c.load)
	}
	if err != nil {
		return err
	}
	for range c.own {
		p, board, err := startLoad(ctx, r.db, "burn")
		if err != nil {
			return err
		}
		r.own, r.boards = append(r.own, p), append(r.boards, board)
		if err := p.Signal(unix.SIGSTOP); err != nil {
			return err
		}
	}
	for i := range c.burners {
		box, err := r.sandboxes.Create(sandbox.Spec{Name: burnerName(i)})
		if err != nil {
			return err
		}
		r.boxes = append(r.boxes, box)
		if err := r.startBeside(ctx, box, "burn"); err != nil {
			return err
		}
		if err := r.burn(0); err != nil {
			return err
		}
	}
	if err := r.startStreams(ctx, c.streams); err != nil {
		return err
	}
	return r.burn(0)
}

// startBeside starts a neighbour's generator.
func (r *blockioRig) startBeside(ctx context.Context, box *sandbox.Box, args ...string) error {
	p, board, err := startLoad(ctx, box, args...)
	if err != nil {
		return fmt.Errorf("%v: %w", args, err)
	}
	r.burners, r.boards = append(r.burners, p), append(r.boards, board)
	return nil
}

// startLoad starts a generator in the container with the reservation.
func (r *blockioRig) startLoad(ctx context.Context, args []string) (err error) {
	to := r.target
	if args[0] == "mail" {
		if to = filepath.Join(r.dir, "mail"); os.Mkdir(to, 0o700) != nil {
			return fmt.Errorf("make %s", to)
		}
	}
	if _, r.board, err = startLoad(ctx, r.db, append([]string{args[0], "--to", to}, args[1:]...)...); err != nil {
		return err
	}
	r.boards = append(r.boards, r.board)
	return nil
}

// lighten gives the parent cgroup of all sandboxes the weight of one container. With the
// weight of 13, the burners would leave little CPU time to the agent and to this program,
// which are outside that cgroup.
func lighten(box *sandbox.Box) error {
	for _, dir := range box.Cgroups() {
		parent := filepath.Dir(dir)
		if _, err := cgroup.Weight(parent); err != nil {
			continue // the hierarchy of another controller
		}
		name, usual := "cpu.shares", "1024"
		if _, err := os.Stat(filepath.Join(parent, name)); err != nil {
			name, usual = "cpu.weight", "100"
		}
		return cgroup.File(filepath.Join(parent, name)).Write(usual)
	}
	return nil
}

// scratchSize is the size of the scratch file, in MiB. It lies on a real disk: a loop device would
// distort the result, because kernel threads do its work, they wait for the burners as well, and no
// container is charged for that wait.
const scratchSize = 256

func startLoad(ctx context.Context, box *sandbox.Box, args ...string) (*sandbox.Process, *load.Board, error) {
	cmd, board, err := load.Command(args...)
	if err != nil {
		return nil, nil, err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p, err := box.Start(cmd)
	if err != nil {
		return nil, nil, errors.Join(err, board.Close())
	}
	return p, board, board.Await(ctx, p.Done())
}

func (r *blockioRig) startAgent() error {
	if err := os.Mkdir(r.policies(), 0o755); err != nil {
		return err
	}
	var set string
	switch {
	case r.config.own > 0: // measure what would be done, and to which containers
		set = "io.help: off"
	case r.config.streams > 0:
		set = "io.yield: auto, io.interrupts: auto"
	case r.config.yield:
		set = "io.yield: auto"
	}
	if set != "" {
		policy := fmt.Sprintf("match: {name: \"blockio-*\"}\nset: {%s}\n", set)
		if err := os.WriteFile(filepath.Join(r.policies(), policyFile), []byte(policy), 0o644); err != nil {
			return err
		}
	}
	return r.launch(r.node, r.sandboxes)
}

// known waits until the agent knows count containers, and has applied their policy.
func (r *blockioRig) known(ctx context.Context, count int) error {
	err := r.wait(ctx, "blockio", "", count, func(_ api.Container, s api.FeatureStatus) bool { return s.State == api.StateDone })
	if err != nil {
		return err
	}
	_, err = r.client.SetCapacity(ctx, api.CapacityRequest{Device: r.device, BlockIOFigures: api.BlockIOFigures{
		ReadIOPS: 10_000_000, WriteIOPS: 10_000_000, ReadBytes: 1 << 40, WriteBytes: 1 << 40,
	}})
	return err
}

func (r *blockioRig) close() error {
	errs := []error{r.stop()}
	if r.sandboxes != nil {
		errs = append(errs, r.sandboxes.Close())
	}
	for _, b := range r.boards {
		errs = append(errs, b.Close())
	}
	if r.scratch != nil {
		errs = append(errs, r.scratch.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(r.dir))...)
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
