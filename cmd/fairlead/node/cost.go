package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// cost is what an agent took in a window.
type cost struct {
	PID      int        `json:"pid"`
	Seconds  float64    `json:"seconds"`
	CPU      float64    `json:"cpu_seconds"` // of the process
	Memory   int        `json:"resident_bytes"`
	Programs []bpf.Cost `json:"programs"`
}

func showCost(ctx context.Context, e verb.Env, cfg agent.Config, window time.Duration, out *cli.Format) error {
	c := cost{Seconds: window.Seconds()}
	var err error
	if c.PID, err = listener(ctx, cfg.Socket); err != nil {
		return err
	}
	before, err := process(cfg.Roots.Proc, c.PID)
	if err != nil {
		return err
	}
	if c.Programs, err = bpf.Costs(ctx, window); err != nil {
		return err
	}
	after, err := process(cfg.Roots.Proc, c.PID)
	if err != nil {
		return err
	}
	c.CPU, c.Memory = after.CPUTime()-before.CPUTime(), after.ResidentMemory()
	return out.Print(e.Stdout, c, func(w io.Writer) { printCost(w, c) })
}

func printCost(w io.Writer, c cost) {
	share := func(seconds float64) string { return fmt.Sprintf("%.2f%%", 100*seconds/c.Seconds) }
	fmt.Fprintf(w, "The agent (process %d) took %s of a CPU over %vs, and holds %d MB.\n", c.PID, share(c.CPU), c.Seconds, c.Memory/1e6)
	columns.Below(w, c.Programs,
		columns.Plain("PROGRAM", func(p bpf.Cost) string { return p.Program }),
		columns.Number("COPIES", func(p bpf.Cost) string { return fmt.Sprint(p.Copies) }),
		columns.Number("RUNS/S", func(p bpf.Cost) string { return fmt.Sprintf("%.0f", float64(p.Runs)/c.Seconds) }),
		columns.Number("NS/RUN", func(p bpf.Cost) string {
			return columns.If(p.Runs > 0, fmt.Sprint(p.Time.Nanoseconds()/int64(max(p.Runs, 1))))
		}),
		columns.Number("CPU", func(p bpf.Cost) string { return share(p.Time.Seconds()) }),
	)
}

// listener returns the process that listens at a socket.
func listener(ctx context.Context, socket string) (pid int, err error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, fmt.Errorf("%w at %s: %w", api.ErrNoAgent, socket, err)
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	control := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	if err = errors.Join(control, err); err != nil {
		return 0, fmt.Errorf("find the agent at %s: %w", socket, err)
	}
	return pid, nil
}

func process(proc string, pid int) (procfs.ProcStat, error) {
	fs, err := procfs.NewFS(proc)
	if err != nil {
		return procfs.ProcStat{}, err
	}
	p, err := fs.Proc(pid)
	if err != nil {
		return procfs.ProcStat{}, fmt.Errorf("find process %d: %w", pid, err)
	}
	return p.Stat()
}
