package latency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

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

// begin starts the recording. If policy does not have the container measured, begin does, until end
// is called or this program ends in any way.
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

// measure has a container measured until end is called.
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
