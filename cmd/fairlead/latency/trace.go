package latency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

func latencyTraceVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace CONTAINER",
		Short: "Show a container's packets one by one",
		Long: `Show the packets of a container one by one, with what each took on this host, until
interrupted. Packets that could not be kept are counted at the end. With -o json there is
one object on each line. A container that policy does not have measured is, while this runs.

Inside a container that was given the agent's self socket, --self shows the container's
own packets. There --on begins to record them for ten minutes, and returns; --off ends
that; --kept prints what has been recorded since. All packets are recorded then, and
filters choose what is printed.`,
		Example: `  fairlead latency trace web-1 --protocol tcp --port 443
  fairlead latency trace web-1 --sample 64 -o json
  fairlead latency trace --self --on; ping -c 10 192.0.2.1; fairlead latency trace --self --kept`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	var want packets
	want.add(cmd)
	cmd.Flags().Uint32Var(&want.sample, "sample", 1, "all packets of one flow in so many, both ways, and none of the others")
	count := cmd.Flags().Uint("count", 0, "end after so many packets; 0: when interrupted")
	on := cmd.Flags().Bool("on", false, "with --self: begin to record, and return")
	off := cmd.Flags().Bool("off", false, "with --self: end that")
	kept := cmd.Flags().Bool("kept", false, "print what has been recorded up to now, and end")
	asJSON := cmd.Flags().StringP("output", "o", "table", "how to print: table or json")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) (failed error) {
		if *asJSON != "table" && *asJSON != "json" {
			return cli.Usagef("-o %q: it is one of table, json", *asJSON)
		}
		if want.sample == 0 {
			return cli.Usagef("--sample 0: must be at least 1")
		}
		if *on && *off || *kept && (*on || *off) || (*on || *off) && !want.self {
			return cli.Usagef("want one of --on, --off and --kept, the first two with --self")
		}
		ask, err := want.source(c, args)
		if err != nil {
			return err
		}
		defer ask.close()
		if *on || *off {
			now, err := ask.tracing(cmd.Context(), *on)
			switch {
			case err != nil:
				return verb.ReadingHint(err)
			case now.On:
				_, err = fmt.Fprintf(e.Stdout, "the packets of this container are recorded until %s\n", now.Until.Local().Format(time.TimeOnly))
			default:
				_, err = fmt.Fprintln(e.Stdout, "the packets of this container are no longer recorded")
			}
			return err
		}
		patience := time.Second
		if *kept {
			patience, ask.filter.After = 0, 1
		}
		got, end, err := ask.begin(cmd.Context(), e, c, strings.Join(args, ""))
		if err != nil {
			return verb.ReadingHint(err)
		}
		defer func() { failed = errors.Join(failed, end()) }()
		print := latencyLine
		if *asJSON == "json" {
			print = func(w io.Writer, r api.LatencyRecord) error { return json.NewEncoder(w).Encode(r) }
		}
		limited, lost := false, got.LostWaits
		var missed, shown, last uint64
		for {
			missed += got.Missed
			limited = limited || got.Limited
			if *kept && len(got.Records) == 0 && got.Next == last {
				break
			}
			last = got.Next
			for _, r := range got.Records {
				if *count > 0 && shown == uint64(*count) {
					break
				}
				if err := print(e.Stdout, r); err != nil {
					return err
				}
				shown++
			}
			if *count > 0 && shown >= uint64(*count) {
				break
			}
			got, err = ask.next(cmd.Context(), patience)
			if cmd.Context().Err() != nil {
				break
			}
			if err != nil {
				return verb.ReadingHint(err)
			}
		}
		if missed > 0 {
			fmt.Fprintf(e.Stderr, "%d packets were overwritten before they were read\n", missed)
		}
		if got.LostWaits > lost {
			fmt.Fprintf(e.Stderr, "%d waits were lost\n", got.LostWaits-lost)
		}
		if limited {
			fmt.Fprintln(e.Stderr, "some packets have no waits: for a container that asks itself they are watched for 10 s of each minute")
		}
		return nil
	})
}

// latencyLine prints a packet in readable form.
func latencyLine(w io.Writer, r api.LatencyRecord) error {
	end := func(addr string, port int) string {
		if port == 0 {
			return addr
		}
		return net.JoinHostPort(addr, strconv.Itoa(port))
	}
	line := fmt.Sprintf("%s %-7s %-5s %s > %s", r.Time.Format("15:04:05.000000"), r.Direction, r.Protocol, end(r.From, r.FromPort), end(r.To, r.ToPort))
	if r.Seq > 0 {
		line += fmt.Sprintf(" seq %d", r.Seq)
	}
	line += fmt.Sprintf(" %d bytes", r.Bytes)
	if r.Added != nil {
		line += "  added " + fine(*r.Added)
	}
	if r.Stack != nil {
		line += "  stack " + fine(*r.Stack)
	}
	var parts []string
	for _, p := range r.Stages {
		parts = append(parts, p.Stage+" "+fine(p.Seconds))
	}
	line = fmt.Sprintf("%s  (%s)\n", line, strings.Join(parts, ", "))
	for _, w := range r.Waits {
		line += latencyWait(w)
	}
	_, err := io.WriteString(w, line)
	return err
}

// latencyWait formats what a CPU did while a packet waited, in one line.
func latencyWait(w api.LatencyWait) string {
	var parts []string
	for _, c := range w.By {
		part := c.Work
		switch {
		case c.Own:
			part = "its own " + c.Work
		case c.Name != "":
			part += " of " + cli.Cut(cli.Show(c.Name), 30)
		case c.Container != 0:
			part += " of id " + c.Container.String()
		case c.Cgroup != "":
			part += " of cgroup " + cli.Show(c.Cgroup)
		}
		parts = append(parts, fine(c.Seconds)+" "+part)
	}
	if w.Unknown > 0 {
		parts = append(parts, fine(w.Unknown)+" not known")
	}
	return fmt.Sprintf("    %s waited %s: %s\n", w.Stage, fine(w.Seconds), strings.Join(parts, ", "))
}

// packets are the flags that select packets.
type packets struct {
	peer, protocol, socket string
	port                   uint16
	sample                 uint32
	self                   bool
}

func (p *packets) add(cmd *cobra.Command) {
	s := cmd.Flags()
	s.StringVar(&p.peer, "peer", "", "packets to or from an address, or a prefix, as 10.0.0.0/8")
	s.Uint16Var(&p.port, "port", 0, "packets to or from a port")
	s.StringVar(&p.protocol, "protocol", "", "packets of tcp, udp, icmp or other")
	s.BoolVar(&p.self, "self", false, "the container in which this runs, by the agent's self socket")
	s.StringVar(&p.socket, "self-socket", api.DefaultSelfSocket, "that socket")
}

// source delivers packets.
type source struct {
	ask    func(context.Context, api.LatencyFilter, time.Duration) (api.LatencyRecords, error)
	filter api.LatencyFilter
	close  func()
	// tracing starts or stops recording the packets of the caller's own container.
	tracing func(context.Context, bool) (api.LatencyTracing, error)
}

// source checks the flags and makes a source. args may name a container.
func (p *packets) source(c *api.Client, args []string) (*source, error) {
	s := &source{filter: api.LatencyFilter{Port: p.port, Protocol: p.protocol, Sample: p.sample}, close: func() {}}
	if p.peer != "" {
		var err error
		if s.filter.Peer, err = api.ParsePeer(p.peer); err != nil {
			return nil, cli.Usagef("--peer %q: want an address, or a prefix, as 10.0.0.0/8", p.peer)
		}
	}
	if p.protocol != "" && !slices.Contains([]string{api.LatencyTCP, api.LatencyUDP, api.LatencyICMP, api.LatencyOther}, p.protocol) {
		return nil, cli.Usagef("--protocol %q: it is one of tcp, udp, icmp, other", p.protocol)
	}
	switch {
	case p.self == (len(args) == 1):
		return nil, cli.Usagef("want a CONTAINER, or --self")
	case p.self:
		own := api.Dial(p.socket)
		s.ask, s.tracing, s.close = own.SelfLatencyRecords, own.SelfLatencyTracing, own.Close
	default:
		s.ask = func(ctx context.Context, f api.LatencyFilter, over time.Duration) (api.LatencyRecords, error) {
			return c.LatencyRecords(ctx, args[0], f, over)
		}
	}
	return s, nil
}

// begin starts the recording. If policy does not measure the container, begin does, until end is
// called or this program ends in any way.
func (s *source) begin(ctx context.Context, e verb.Env, c *api.Client, ref string) (first api.LatencyRecords, end func() error, err error) {
	end = func() error { return nil }
	first, err = s.next(ctx, 0)
	if n := (*api.Error)(nil); !errors.As(err, &n) || n.Code != "not_measured" || ref == "" {
		return first, end, err
	}
	if end, err = measure(ctx, e, c, ref); err != nil {
		return first, nil, err
	}
	if first, err = s.next(ctx, 0); err != nil {
		return first, nil, errors.Join(err, end())
	}
	return first, end, nil
}

// renewal is the interval at which this program renews a measurement. It is shorter than its
// expiry.
const renewal = 4 * time.Second

// measure measures a container until end is called.
func measure(ctx context.Context, e verb.Env, c *api.Client, ref string) (end func() error, err error) {
	x, err := c.Explain(ctx, ref)
	if err != nil {
		return nil, err
	}
	ref = api.Ref(x.Container.ID)
	if _, err := c.LatencyMeasured(ctx, ref, true); err != nil {
		return nil, err
	}
	fmt.Fprintf(e.Stderr, "%s: its packets are measured while this runs\n", columns.Whom(x.Container.Name, x.Container.Source, x.Container.ID))
	going, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for verb.Wait(going, renewal) == nil {
			c.LatencyMeasured(going, ref, true) // if it fails, reading records fails too
		}
	}()
	return func() error {
		stop()
		<-done
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer cancel()
		_, err := c.LatencyMeasured(ctx, ref, false)
		if n := (*api.Error)(nil); errors.As(err, &n) && n.Code == "not_found" {
			return nil // the program has ended
		}
		return err
	}, nil
}

// next returns the packets since its last call. The first call starts the recording.
func (s *source) next(ctx context.Context, over time.Duration) (api.LatencyRecords, error) {
	r, err := s.ask(ctx, s.filter, over)
	if err == nil {
		s.filter.After = r.Next
	}
	return r, err
}
