package latency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/enter"
)

func latencyRunVerb(e verb.Env) *cobra.Command {
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

The last lines are the mean and the sum of all. A container that policy does not have
measured is, while this runs. Ctrl-C ends the program, and shows what was measured so
far. A request is paired with its reply by
sequence number for ICMP, by ports and order for UDP; of TCP only handshakes are. The
program is one of the host's, not of the container's, and runs with the rights of whoever calls this.`,
		Example: `  fairlead latency run --container web-1 -- ping -c 10 192.0.2.1`,
		Args:    cli.NArgs(1, 1000, "a PROGRAM"),
	}
	r := latencyRun{env: e}
	r.packets.add(cmd)
	cmd.Flags().StringVar(&r.container, "container", "", "the container")
	r.out = cli.FormatFlag(cmd)
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		return r.run(cmd.Context(), c, exec.Command(args[0], args[1:]...))
	})
}

func latencyProbeVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "probe (--container CONTAINER | --self) ADDRESS:PORT",
		Short: "Measure round trips by UDP datagrams or TCP handshakes, without this host's expense",
		Long: `Measure round trips from a container as run does, with a prober of its own: TCP handshakes
with a port that listens, or UDP datagrams to one that answers each of them (echo).`,
		Args: cli.NArgs(1, 1, "one ADDRESS:PORT"),
	}
	r := latencyRun{env: e}
	r.packets.add(cmd)
	cmd.Flags().StringVar(&r.container, "container", "", "the container")
	count := cmd.Flags().UintP("count", "c", 10, "how many")
	interval := cmd.Flags().Duration("pause", 100*time.Millisecond, "between two of them")
	udp := cmd.Flags().Bool("udp", false, "datagrams, not handshakes")
	inside := cmd.Flags().Bool("inside", false, "")
	hidden := cmd.Flags().MarkHidden("inside")
	r.out = cli.FormatFlag(cmd)
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		network := "tcp"
		if *udp {
			network = "udp"
		}
		host, port, err := net.SplitHostPort(args[0])
		n, perr := strconv.ParseUint(port, 10, 16)
		if err := errors.Join(err, perr, hidden); err != nil || n == 0 {
			return cli.Usagef("%q: want ADDRESS:PORT", args[0])
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

// knock makes the round trips. The agent measures their packets.
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
		failed = cmp.Or(failed, unreached(address, err))
		if err := verb.Wait(ctx, pause); err != nil {
			return err
		}
	}
	return failed
}

// unreached explains why a round trip failed.
func unreached(address string, err error) error {
	var late net.Error
	var op *net.OpError
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &late) && late.Timeout():
		return fmt.Errorf("%s does not answer", address)
	case errors.As(err, &op):
		err = op.Err
	}
	return fmt.Errorf("reach %s: %w", address, err)
}

// latencyRun is one run of a program.
type latencyRun struct {
	env verb.Env
	packets
	container string
	quiet     bool // send the program's output to stderr
	out       *cli.Format
}

func (r *latencyRun) run(ctx context.Context, c *api.Client, program *exec.Cmd) (failed error) {
	var args []string
	if r.container != "" {
		args = []string{r.container}
	}
	ask, err := r.source(c, args)
	if err != nil {
		return err
	}
	defer ask.close()
	if err := startable(program); err != nil {
		return err
	}
	// The first call starts the recording.
	all, end, err := ask.begin(ctx, r.env, c, r.container)
	if err != nil {
		return verb.ReadingHint(err)
	}
	defer func() { failed = errors.Join(failed, end()) }()
	program.Stdout, program.Stderr = r.env.Stdout, r.env.Stderr
	if r.out.Name != "table" || r.quiet {
		program.Stdout = r.env.Stderr
	}
	ended, stop, err := r.start(ctx, c, program)
	if err != nil {
		return err
	}
	defer stop()
	collect := func(ctx context.Context, over time.Duration) error {
		got, err := ask.next(ctx, over)
		all.Records = append(all.Records, got.Records...)
		all.Missed += got.Missed
		return err
	}
	var status error
	for running := true; running; {
		select {
		case status = <-ended:
			running = false
		case <-ctx.Done():
			// Show the round trips so far. The program may also have received the
			// terminal's signal, and may still print.
			status, running = context.Cause(ctx), false
			program.Process.Signal(os.Interrupt)
			select {
			case <-ended:
			case <-time.After(lastWord):
			}
		default:
			if err := collect(ctx, 200*time.Millisecond); err != nil && ctx.Err() == nil {
				return verb.ReadingHint(err)
			}
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := collect(last, 300*time.Millisecond); err != nil {
		return verb.ReadingHint(err)
	}
	trips := roundTrips{Missed: all.Missed}
	trips.Trips, trips.Unpaired = api.LatencyTrips(all.Records)
	var raw, corrected []float64
	for _, t := range trips.Trips {
		raw, corrected = append(raw, t.Raw), append(corrected, t.Corrected)
	}
	if len(raw) > 0 {
		trips.Raw, trips.Corrected = median(raw), median(corrected)
	} else {
		trips.Why = r.why(last, c, program.Args, all.Records, trips.Unpaired)
	}
	return errors.Join(r.out.Print(r.env.Stdout, trips, trips.table), ending(program, status))
}

// median returns the middle of values, which must not be empty.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// lastWord limits how long an interrupted program may take to end.
const lastWord = 2 * time.Second

// startable returns an error if the host does not have the program.
func startable(program *exec.Cmd) error {
	if program.Err == nil {
		return nil
	}
	name := cli.Show(program.Args[0])
	if !errors.Is(program.Err, exec.ErrNotFound) {
		return fmt.Errorf("start %s: %w", name, program.Err)
	}
	how := "install it here"
	if program.Args[0] == "ping" {
		how = "install it here (iputils-ping), or measure by `fairlead latency probe`"
	}
	return fmt.Errorf("there is no program %s on this host: run takes it from the host, not from the container; %s", name, how)
}

// ending explains how a program failed.
func ending(program *exec.Cmd, status error) error {
	var exit *exec.ExitError
	switch {
	case !errors.As(status, &exit):
		return status
	case exit.Exited():
		return fmt.Errorf("%s ended with status %d", cli.Show(program.Args[0]), exit.ExitCode())
	}
	return fmt.Errorf("%s was ended by a signal", cli.Show(program.Args[0]))
}

// start starts the program in the container, or with --self in the caller's.
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
		return nil, nil, verb.ReadingHint(err)
	}
	if of.Ended || of.Container.PID == 0 {
		return nil, nil, fmt.Errorf("container %s has ended", cli.Show(r.container))
	}
	place, err := enter.Of(kernel.Default(), of.Container.PID)
	if err != nil {
		return nil, nil, fmt.Errorf("enter container %s: %w", cli.Show(r.container), err)
	}
	if err := isOf(place, of.Container); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("enter container %s: %w", cli.Show(r.container), err), place.Close())
	}
	p, err := place.Start(program)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("in container %s: %w", cli.Show(r.container), err), place.Close())
	}
	go func() { done <- p.Wait() }()
	stop = func() {
		p.Kill()
		<-p.Done()
		place.Close()
	}
	return done, stop, nil
}

// isOf returns an error unless a place is in the network namespace and cgroup of a container. If
// not, the container has ended, and another process has its PID.
func isOf(p enter.Place, c api.Container) error {
	ended := fmt.Errorf("it has ended, and process %d is another one", c.PID)
	if ns, err := p.NetNS.Stat(); err != nil || ns.Sys().(*syscall.Stat_t).Ino != c.NetNS {
		return errors.Join(ended, err)
	}
	tree := p.Groups[0]
	for dir := tree.Dir; len(dir) >= len(tree.Mount); dir = filepath.Dir(dir) {
		if id, err := cgroup.ID(dir); err != nil || id == uint64(c.ID) {
			return err
		}
	}
	return ended
}

// roundTrips is the result of a run.
type roundTrips struct {
	Trips     []api.LatencyTrip `json:"round_trips"`
	Unpaired  int               `json:"unpaired_packets"`
	Missed    uint64            `json:"missed_packets"`
	Raw       float64           `json:"raw_p50_seconds"`
	Corrected float64           `json:"corrected_p50_seconds"`
	Why       string            `json:"why,omitempty"` // why there are no round trips
}

// why explains why the records of a program's run contain no round trip.
func (r *latencyRun) why(ctx context.Context, c *api.Client, args []string, records []api.LatencyRecord, unpaired int) string {
	var list []api.Container
	if !r.self {
		list, _ = c.Containers(ctx) // without the list, the reason is less specific
	}
	peers := append([]string{r.peer}, args...)
	for _, rec := range records {
		far := rec.To
		if rec.Direction == "ingress" {
			far = rec.From
		}
		peers = append(peers, far)
	}
	for _, peer := range peers {
		if where := onThisHost(peer, list); where != "" {
			return fmt.Sprintf("%s is %s: what goes there passes no uplink, and this host is all of the way; `fairlead latency` has the times between containers (local)", cli.Show(peer), where)
		}
	}
	partly := 0
	for _, rec := range records {
		if rec.Stack == nil {
			partly++
		}
	}
	switch {
	case len(records) == 0:
		return "no packet of the container was seen while it ran; it sent none, or none that --peer, --port and --protocol select"
	case partly > 0:
		return fmt.Sprintf("%d of %d packets were not measured on their whole way; `fairlead latency` says what is not covered", partly, len(records))
	}
	return fmt.Sprintf("%d packets were seen, and none was answered", unpaired)
}

// onThisHost describes where an address is on this host; "" if it is elsewhere or invalid.
func onThisHost(peer string, list []api.Container) string {
	addr, err := netip.ParseAddr(peer)
	if err != nil {
		return ""
	}
	for _, o := range list {
		for _, i := range o.Interfaces {
			for _, text := range i.Addrs {
				if p, err := netip.ParsePrefix(text); err == nil && p.Addr() == addr {
					return "container " + cli.Show(o.Name) + " of this host"
				}
			}
		}
	}
	local, _ := net.InterfaceAddrs() // without the addresses, the reason is less specific
	for _, a := range local {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr() == addr {
			return "this host itself"
		}
	}
	return ""
}

func (t roundTrips) table(w io.Writer) {
	if len(t.Trips) == 0 {
		columns.Note(w, "No round trip was measured: "+t.Why+".")
		return
	}
	type row struct {
		api.LatencyTrip
		peer, seq string
	}
	var rows []row
	var sum, mean api.LatencyTrip
	for _, r := range t.Trips {
		rows = append(rows, row{r, cli.Show(r.Peer), fmt.Sprint(r.Seq)})
		sum.Raw, sum.Egress, sum.Ingress, sum.Corrected = sum.Raw+r.Raw, sum.Egress+r.Egress, sum.Ingress+r.Ingress, sum.Corrected+r.Corrected
	}
	n := float64(len(t.Trips))
	mean.Raw, mean.Egress, mean.Ingress, mean.Corrected = sum.Raw/n, sum.Egress/n, sum.Ingress/n, sum.Corrected/n
	mean.Protocol, sum.Protocol = "mean", "sum"
	columns.Print(w, append(rows, row{mean, "", " "}, row{sum, "", " "}),
		columns.Plain("PROTOCOL", func(r row) string { return r.Protocol }),
		columns.Plain("PEER", func(r row) string { return r.peer }).Cut(40),
		columns.Number("SEQ", func(r row) string { return r.seq }),
		columns.Number("RAW", func(r row) string { return fine(r.Raw) }),
		columns.Number("EGRESS", func(r row) string { return fine(r.Egress) }),
		columns.Number("INGRESS", func(r row) string { return fine(r.Ingress) }),
		columns.Number("CORRECTED", func(r row) string { return fine(r.Corrected) }),
	)
	fmt.Fprintf(w, "%d round trips, median %s raw, %s corrected; %d packets without a reply", len(t.Trips), fine(t.Raw), fine(t.Corrected), t.Unpaired)
	if t.Missed > 0 {
		fmt.Fprintf(w, "; %d overwritten before they were read", t.Missed)
	}
	fmt.Fprintln(w)
}
