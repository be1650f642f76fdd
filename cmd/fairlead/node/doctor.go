package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/enter"
)

func doctorVerb(e verb.Env) *cobra.Command {
	f, flags := verb.NewAgentFlags(e)
	cmd := &cobra.Command{
		Use:        "doctor",
		SuggestFor: []string{"check", "probe", "diagnose", "info"},
		Short:      "List what this host supports, and how to fix the rest; needs no agent",
		Long: `List what this host supports, found by trying it: each capability is full, degraded
or unavailable, with the reason and a remedy. Also list other software that uses
the same hooks, how each feature stands, and where the rate of each uplink comes
from. The last sentence says what works here, and which one remedy would help
most. Each trial is undone at once. The command needs no agent, and
reports what it sees from where it runs; of an agent that answers it also lists
the policies that match no container. It exits with 1 if fairlead cannot work
here at all, or if it was not run as root: then it cannot tell.

With --cost it shows instead what an agent that runs here takes: its process, and
each BPF program, whose time is part of the packets' and tasks' that it runs for.`,
		Args: cli.NArgs(0, 0, ""),
	}
	f.Take(cmd, flags, "docker-host", "podman-host", "containerd", "proc", "bpffs", "socket", "config")
	cmd.Flags().AddFlagSet(f.Features)
	out := cli.FormatFlag(cmd)
	window := cmd.Flags().Duration("cost", 0, "show what the agent and its BPF programs take, over so long")
	cmd.Flags().Lookup("cost").NoOptDefVal = "5s"
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := verb.Configure(cmd, f.Config, flags); err != nil {
			return err
		}
		if *window > 0 {
			return showCost(cmd.Context(), e, f.Cfg, *window, out)
		}
		// Other users may lack access, or with hidepid not see process 1.
		if err := enter.HostCgroups(f.Cfg.Roots.Proc); err != nil && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		r := append(agent.Examine(cmd.Context(), f.Cfg), unmatched(cmd.Context(), f.Cfg.Socket)...)
		if err := out.Print(e.Stdout, r, func(w io.Writer) { doctor(w, r) }); err != nil {
			return err
		}
		return useless(r)
	}
	return cmd
}

// unmatched asks a running agent for the policies that match nothing.
func unmatched(ctx context.Context, socket string) api.Report {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c := api.Dial(socket)
	defer c.Close()
	st, err := c.Status(ctx)
	if err != nil {
		return nil
	}
	return agent.Unmatched(st.Policy)
}

// useless returns an error if nothing works here, or if the caller lacks the privileges to tell.
func useless(r api.Report) error {
	works := false
	for _, x := range r {
		switch {
		case (x.Capability == "kernel" || x.Capability == "cgroup-v2") && x.Level == api.LevelUnavailable:
			return fmt.Errorf("fairlead cannot work on this host: %s", x.Why)
		case x.Capability == "root" && x.Level == api.LevelUnavailable:
			return fmt.Errorf("this was not run as root (%s), and so says little of what an agent could do here: run it as root", x.Why)
		case x.Area == api.AreaFeatures:
			works = works || x.Level != api.LevelUnavailable
		}
	}
	if !works {
		return errors.New("no feature works here: the list says what each lacks")
	}
	return nil
}

func doctor(w io.Writer, r api.Report) {
	const head = "  %-11s  %-18s  "
	wide := max(30, cli.Across(w, 99)-len(fmt.Sprintf(head, "", "")))
	count := map[api.Level]int{}
	area := ""
	for _, x := range r {
		if x.Area != area {
			if area != "" {
				fmt.Fprintln(w)
			}
			area = x.Area
			fmt.Fprintf(w, "%s\n", cli.Show(area))
		}
		count[x.Level]++
		says := cli.ShowText(x.Detail)
		if x.Level != api.LevelFull {
			says = cli.ShowText(x.Why)
			if x.Detail != "" {
				says += " (" + cli.ShowText(x.Detail) + ")"
			}
		}
		text := cli.Fold(says, wide)
		if x.Mend != "" {
			text = append(text, cli.Fold("→ "+cli.ShowText(x.Mend), wide)...)
		}
		level, capability := string(x.Level), cli.Show(x.Capability)
		for _, t := range text {
			fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf(head, level, capability)+t, " "))
			level, capability = "", "" // in the first line alone
		}
	}
	fmt.Fprintf(w, "\n%d full, %d degraded, %d unavailable\n", count[api.LevelFull], count[api.LevelDegraded], count[api.LevelUnavailable])
	for _, line := range cli.Fold(cli.ShowText(r.Summary()), cli.Across(w, 80)) {
		fmt.Fprintln(w, line)
	}
}

// cost is the CPU time and memory of an agent in a window.
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
func listener(ctx context.Context, socket string) (pid int, _ error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, fmt.Errorf("%w at %s: %w", api.ErrNoAgent, socket, err)
	}
	defer c.Close()
	f, err := c.(*net.UnixConn).File()
	if err != nil {
		return 0, err
	}
	defer f.Close()
	cred, err := unix.GetsockoptUcred(int(f.Fd()), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, fmt.Errorf("find the agent at %s: %w", socket, err)
	}
	return int(cred.Pid), nil
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
