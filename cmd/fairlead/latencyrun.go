package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/report"
	"github.com/fairlead-project/fairlead/sandbox"
)

func latencyRunVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "run (--container CONTAINER | --self) -- PROGRAM [ARG...]",
		Short: "Run a program in a container's network, and take this host's expense off its round trips",
		Long: `Run a program, such as ping, in the network namespace and the cgroup of a container, or
with --self where this runs, and print each of its round trips:

  RAW        as the container has it, from when its packet comes to its device to when
             the reply comes to its socket
  EGRESS     what the way from there to the uplink took
  INGRESS    what the way from the uplink to the socket took
  CORRECTED  what is left: the time that the packet was beyond the uplink

The last lines are the mean and the sum of all. A request is paired with its reply by
sequence number for ICMP, by ports and order for UDP; of TCP only handshakes are. The
program is one of the host's, and runs with the rights of whoever calls this.`,
		Example: `  fairlead latency run --container web-1 -- ping -c 10 192.0.2.1`,
		Args:    nargs(1, 1000, "a PROGRAM"),
	}
	r := latencyRun{env: e}
	r.packets.add(cmd)
	cmd.Flags().StringVar(&r.container, "container", "", "the container")
	r.out = formatFlag(cmd)
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		return r.run(cmd.Context(), c, exec.Command(args[0], args[1:]...))
	})
}

func latencyProbeVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "probe (--container CONTAINER | --self) ADDRESS:PORT",
		Short: "Measure round trips by UDP datagrams or TCP handshakes, without this host's expense",
		Long: `Measure round trips from a container as run does, with a prober of its own: TCP handshakes
with a port that listens, or UDP datagrams to one that answers each of them (echo).`,
		Args: nargs(1, 1, "one ADDRESS:PORT"),
	}
	r := latencyRun{env: e}
	r.packets.add(cmd)
	cmd.Flags().StringVar(&r.container, "container", "", "the container")
	count := cmd.Flags().UintP("count", "c", 10, "how many")
	interval := cmd.Flags().Duration("pause", 100*time.Millisecond, "between two of them")
	udp := cmd.Flags().Bool("udp", false, "datagrams, not handshakes")
	inside := cmd.Flags().Bool("inside", false, "")
	hidden := cmd.Flags().MarkHidden("inside")
	r.out = formatFlag(cmd)
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		network := "tcp"
		if *udp {
			network = "udp"
		}
		host, port, err := net.SplitHostPort(args[0])
		n, perr := strconv.ParseUint(port, 10, 16)
		if err := errors.Join(err, perr, hidden); err != nil || n == 0 {
			return usagef("%q: want ADDRESS:PORT", args[0])
		}
		if *inside {
			return knock(cmd.Context(), network, args[0], *count, *interval)
		}
		exe, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find own program: %w", err)
		}
		r.port, r.protocol, r.quiet = uint16(n), network, true
		if _, err := api.ParsePeer(host); err == nil {
			r.peer = host
		}
		return r.run(cmd.Context(), c, exec.Command(exe, "latency", "probe", "--inside", "--udp="+strconv.FormatBool(*udp),
			"--count", fmt.Sprint(*count), "--pause", interval.String(), args[0]))
	})
}

// knock makes the round trips. It measures nothing; the agent measures the packets.
func knock(ctx context.Context, network, address string, count uint, pause time.Duration) error {
	d := net.Dialer{Timeout: 5 * time.Second}
	failed := error(nil)
	for range count {
		c, err := d.DialContext(ctx, network, address)
		if err == nil && network == "udp" {
			_, err = c.Write([]byte("fairlead"))
			c.SetReadDeadline(time.Now().Add(time.Second))
			if err == nil {
				_, err = c.Read(make([]byte, 64))
			}
		}
		if err == nil {
			c.Close()
		}
		failed = cmp.Or(failed, err)
		if err := wait(ctx, pause); err != nil {
			return err
		}
	}
	return failed
}

// latencyRun is one run of a program.
type latencyRun struct {
	env env
	packets
	container string
	quiet     bool // send the program's output to stderr
	out       *format
}

// roundTrips is the result of a run.
type roundTrips struct {
	Trips     []api.LatencyTrip `json:"round_trips"`
	Unpaired  int               `json:"unpaired_packets"`
	Missed    uint64            `json:"missed_packets"`
	Raw       float64           `json:"raw_p50_seconds"`
	Corrected float64           `json:"corrected_p50_seconds"`
	OwnCost   float64           `json:"own_cost_p50_seconds"` // of a round trip
	Less      bool              `json:"less_own_cost"`        // it is subtracted, and else included
}

func (r *latencyRun) run(ctx context.Context, c *api.Client, program *exec.Cmd) error {
	var args []string
	if r.container != "" {
		args = []string{r.container}
	}
	ask, err := r.source(c, args)
	if err != nil {
		return err
	}
	defer ask.close()
	// The first call starts the recording.
	all, err := ask.next(ctx, 0)
	if err != nil {
		return readingHint(err)
	}
	program.Stdout, program.Stderr = r.env.stdout, r.env.stderr
	if r.out.name != "table" || r.quiet {
		program.Stdout = r.env.stderr
	}
	ended, stop, err := r.start(ctx, c, program)
	if err != nil {
		return err
	}
	defer stop()
	collect := func(over time.Duration) error {
		got, err := ask.next(ctx, over)
		all.Records = append(all.Records, got.Records...)
		all.Missed += got.Missed
		if got.OwnCost != nil {
			all.OwnCost = got.OwnCost
		}
		return err
	}
	var status error
	for running := true; running; {
		select {
		case status = <-ended:
			running = false
		case <-ctx.Done():
			return ctx.Err()
		default:
			if err := collect(200 * time.Millisecond); err != nil {
				return readingHint(err)
			}
		}
	}
	if err := collect(300 * time.Millisecond); err != nil {
		return readingHint(err)
	}
	trips := roundTrips{Missed: all.Missed, Less: r.less}
	with, _ := api.LatencyTrips(all.Records, nil)
	without, unpaired := api.LatencyTrips(all.Records, all.OwnCost)
	trips.Trips, trips.Unpaired = with, unpaired
	if r.less {
		trips.Trips = without
	}
	var raw, corrected, own []float64
	for i, t := range trips.Trips {
		raw, corrected, own = append(raw, t.Raw), append(corrected, t.Corrected), append(own, with[i].Raw-without[i].Raw)
	}
	if len(raw) > 0 { // otherwise there is no median
		trips.Raw, trips.Corrected, trips.OwnCost = report.Median(raw), report.Median(corrected), report.Median(own)
	}
	return errors.Join(r.out.print(r.env.stdout, trips, trips.table), status)
}

// start starts the program in the container, or with --self in this one.
func (r *latencyRun) start(ctx context.Context, c *api.Client, program *exec.Cmd) (ended <-chan error, stop func(), err error) {
	done := make(chan error, 1)
	if r.self {
		if err := program.Start(); err != nil {
			return nil, nil, fmt.Errorf("start %s: %w", program.Path, err)
		}
		go func() { done <- program.Wait() }()
		return done, func() { program.Process.Kill() }, nil
	}
	of, err := c.Explain(ctx, r.container)
	if err != nil {
		return nil, nil, readingHint(err)
	}
	list, err := c.Containers(ctx)
	if err != nil {
		return nil, nil, err
	}
	i := slices.IndexFunc(list, func(o api.Container) bool { return o.ID == of.Container.ID })
	if i < 0 || list[i].PID == 0 {
		return nil, nil, fmt.Errorf("container %s has ended", show(r.container))
	}
	dir, err := os.MkdirTemp("", "fairlead-run-")
	if err != nil {
		return nil, nil, fmt.Errorf("make a directory: %w", err)
	}
	h, err := sandbox.New(sandbox.Config{Dir: dir})
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	box, err := h.Adopt(list[i].Name, list[i].PID)
	if err != nil {
		return nil, nil, errors.Join(err, h.Close(), os.RemoveAll(dir))
	}
	stop = func() { errors.Join(box.Destroy(), h.Close(), os.RemoveAll(dir)) }
	p, err := box.Start(program)
	if err != nil {
		stop()
		return nil, nil, err
	}
	go func() { done <- p.Wait() }()
	return done, stop, nil
}

func (t roundTrips) table(w io.Writer) {
	columns := []column{{"PROTOCOL", 0}, {"PEER", 40}, {"SEQ", 0}, {"RAW", 0}, {"EGRESS", 0}, {"INGRESS", 0}, {"CORRECTED", 0}}
	var rows [][]string
	for _, r := range t.Trips {
		rows = append(rows, []string{r.Protocol, show(r.Peer), fmt.Sprint(r.Seq), fine(r.Raw), fine(r.Egress), fine(r.Ingress), fine(r.Corrected)})
	}
	var sum api.LatencyTrip
	for _, r := range t.Trips {
		sum.Raw, sum.Egress, sum.Ingress, sum.Corrected = sum.Raw+r.Raw, sum.Egress+r.Egress, sum.Ingress+r.Ingress, sum.Corrected+r.Corrected
	}
	if n := float64(len(t.Trips)); n > 0 {
		rows = append(rows, []string{"mean", "", "", fine(sum.Raw / n), fine(sum.Egress / n), fine(sum.Ingress / n), fine(sum.Corrected / n)})
		rows = append(rows, []string{"sum", "", "", fine(sum.Raw), fine(sum.Egress), fine(sum.Ingress), fine(sum.Corrected)})
	}
	right(columns, rows, 2, len(columns)-1)
	table(w, columns, rows)
	fmt.Fprintf(w, "%d round trips, median %s raw, %s corrected; %d packets without a reply", len(t.Trips), fine(t.Raw), fine(t.Corrected), t.Unpaired)
	if t.Missed > 0 {
		fmt.Fprintf(w, "; %d overwritten before they were read", t.Missed)
	}
	fmt.Fprintln(w)
	if t.OwnCost > 0 {
		what := "are part of these times (--less-own-cost subtracts them)"
		if t.Less {
			what = "have been subtracted"
		}
		fmt.Fprintf(w, "%s of a round trip, in the programs that measure it, %s\n", fine(t.OwnCost), what)
	}
}
