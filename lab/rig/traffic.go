package rig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Generator is a load generator, or a real server, that runs in the rig.
type Generator struct {
	*load.Board // nil for a real server
	*sandbox.Process

	stopped bool
}

// Stop ends the generator.
func (g *Generator) Stop() error {
	g.Kill()
	<-g.Done()
	was := g.stopped
	if g.stopped = true; was || g.Board == nil {
		return nil
	}
	return g.Close()
}

// Ended returns an error if the generator has ended without a Stop.
func (g *Generator) Ended() error {
	select {
	case <-g.Done():
		if !g.stopped {
			return fmt.Errorf("a load generator has ended: %w", g.Wait())
		}
	default:
	}
	return nil
}

// Stop ends all generators of Start and Serve, the last first, so clients end before their servers.
func (r *Rig) Stop() error {
	slices.Reverse(r.load)
	err := Stop(r.load...)
	r.load = nil
	return err
}

// Ended returns an error if any generator has ended without a Stop.
func (r *Rig) Ended() error {
	var errs []error
	for _, g := range r.load {
		errs = append(errs, g.Ended())
	}
	return errors.Join(errs...)
}

// Freeze stops the generator until Thaw, so that it uses no CPU time.
func (g *Generator) Freeze() error { return g.Signal(unix.SIGSTOP) }

// Thaw resumes the generator.
func (g *Generator) Thaw() error { return g.Signal(unix.SIGCONT) }

// cpusOf returns the CPUs for processes in a sandbox; empty: all.
func (r *Rig) cpusOf(box *sandbox.Box) []int {
	i := slices.Index(r.Boxes, box)
	switch {
	case r.Path == Local:
		return nil
	case box == r.Outside:
		return []int{SenderCPU}
	case box == r.Node:
		return []int{r.cpu}
	case i >= 0:
		return []int{r.Containers[i].CPU}
	}
	return []int{SharedCPU}
}

// Start runs a load generator with the arguments args of load.Main in one of the rig's sandboxes, and
// waits until it is ready. In Outside it runs on the sender's CPU. It ends with the rig or by Stop.
func (r *Rig) Start(ctx context.Context, box *sandbox.Box, args ...string) (*Generator, error) {
	cmd, board, err := load.Command(args...)
	if err != nil {
		return nil, err
	}
	p, err := box.Start(cmd, r.cpusOf(box)...)
	if err != nil {
		return nil, errors.Join(err, board.Close())
	}
	g := &Generator{Board: board, Process: p}
	if err := load.Await(ctx, p.Done(), board.Ready); err != nil {
		return nil, errors.Join(fmt.Errorf("%v: %w", args, err), g.Stop())
	}
	r.load = append(r.load, g)
	return g, nil
}

// Kind is a kind of traffic.
type Kind string

// The kinds of traffic. UDP sends datagrams of 1400 bytes at the rate of the sender's board, from a
// socket with the kernel's default buffer. On one machine the sender waits while some 90 of them are in
// the host's queues. Overrun is UDP from a sender that never waits. TCP is bulk. UDPRR and TCPRR are
// requests and responses of 64 bytes, over 16 connections unless Traffic.Conns is set.
const (
	UDP     Kind = "udp"
	Overrun Kind = "udp-overrun"
	TCP     Kind = "tcp"
	UDPRR   Kind = "udp-rr"
	TCPRR   Kind = "tcp-rr"
)

// Traffic is a load between the outside and neighbours of the victim.
type Traffic struct {
	Kind Kind
	// Out makes the neighbours send to the outside. Otherwise they receive. The outside always sends
	// the requests.
	Out bool
	// Uneven sends the first neighbour three UDP datagrams for each datagram to another neighbour, in
	// rows of 100, so that many datagrams share the cost of waking a receiver.
	Uneven bool
	// Fair makes the sender take turns with other processes on its CPU. Otherwise the sender goes first.
	Fair bool
	// Within makes the first container send instead of the outside, over the bridge.
	Within bool
	// Neighbours is the number of neighbours that take part, from the first on; 0: all.
	Neighbours int
	// Conns is the total number of connections, at least one for each neighbour; 0: one for each, for
	// requests at least 16 in total.
	Conns int
	// Congestion is the congestion control of bulk TCP; "": cubic, whatever the machine's default is.
	// BBR paces: it sends from timers, in a softirq other than the network's.
	Congestion string
}

// Running is started traffic.
type Running struct {
	Senders, Receivers []*Generator

	out bool
}

// Stop ends the traffic.
func (t *Running) Stop() error { return errors.Join(Stop(t.Senders...), Stop(t.Receivers...)) }

// Stop ends generators. It ignores nil.
func Stop(all ...*Generator) error {
	var errs []error
	for _, g := range all {
		if g != nil {
			errs = append(errs, g.Stop())
		}
	}
	return errors.Join(errs...)
}

// SetRate sets the senders' total datagrams per second, as [load.Board.SetRate] does. Senders on
// the shared CPU cost nothing there while the rate is 0.
func (t *Running) SetRate(perSecond uint64) error {
	var errs []error
	for _, g := range t.Senders {
		each := perSecond
		if each != load.Flood {
			each /= uint64(len(t.Senders))
		}
		g.Board.SetRate(each)
		if t.out && perSecond == 0 {
			errs = append(errs, g.Freeze())
		} else if t.out {
			errs = append(errs, g.Thaw())
		}
	}
	return errors.Join(errs...)
}

// Send starts traffic, paused until SetRate. Generators that an error leaves behind end with the rig.
func (r *Rig) Send(ctx context.Context, t Traffic) (*Running, error) {
	boxes := r.Neighbours()
	if t.Neighbours > 0 {
		boxes = boxes[:min(t.Neighbours, len(boxes))]
	}
	run := &Running{out: t.Out}
	send, recv, err := t.commands()
	if err != nil {
		return nil, err
	}
	start := func(to *[]*Generator, box *sandbox.Box, args ...string) error {
		g, err := r.Start(ctx, box, args...)
		if err == nil {
			*to = append(*to, g)
		}
		return err
	}
	recv = append(recv, "--listen", ":"+port)
	if t.Out {
		if err := start(&run.Receivers, r.Outside, append(recv, "--nice", senderNice)...); err != nil {
			return nil, err
		}
		for i, b := range boxes {
			conns := max(1, (t.Conns+i)/len(boxes)) // the remainder goes to the last ones
			args := append(send, "--to", outsideAddr+":"+port, "--rate", "0", "--conns", strconv.Itoa(conns))
			if err := start(&run.Senders, b, args...); err != nil {
				return nil, err
			}
		}
		return run, run.SetRate(0)
	}
	var targets []string
	for i, b := range boxes {
		if err := start(&run.Receivers, b, recv...); err != nil {
			return nil, err
		}
		targets = append(targets, r.At(1+i, PortNumber))
	}
	if t.Uneven {
		targets = uneven(targets)
	}
	conns := max(t.Conns, len(targets))
	if t.Conns == 0 && (t.Kind == UDPRR || t.Kind == TCPRR) {
		conns = max(16, conns)
	}
	from := r.Outside
	if t.Within {
		from = r.Victim()
	}
	nice := senderNice
	if t.Fair {
		nice = "0"
	}
	return run, start(&run.Senders, from, append(send, "--to", strings.Join(targets, ","), "--conns", strconv.Itoa(conns),
		"--rate", "0", "--nice", nice)...)
}

// uneven returns the first of the targets three times as often as each of the others.
func uneven(targets []string) (all []string) {
	const row = 100
	for range 2 {
		all = append(all, slices.Repeat(targets[:1], row)...)
	}
	for _, to := range targets {
		all = append(all, slices.Repeat([]string{to}, row)...)
	}
	return all
}

// commands returns the arguments of load.Main for the generators of both sides.
func (t Traffic) commands() (send, recv []string, err error) {
	switch t.Kind {
	case UDP, Overrun:
		send = []string{"udp-send", "--size", "1400"}
		if t.Kind == Overrun {
			send = append(send, "--buffer", "8388608")
		}
		// The receiver waits for some milliseconds while the victim runs. Its buffer must hold the
		// datagrams that arrive meanwhile.
		recv = []string{"udp-recv", "--buffer", "8388608"}
	case TCP:
		send, recv = []string{"tcp-send", "--congestion", cmp.Or(t.Congestion, "cubic")}, []string{"tcp-recv"}
	case UDPRR, TCPRR:
		if t.Out {
			return nil, nil, fmt.Errorf("traffic %s goes in only", t.Kind)
		}
		proto := string(t.Kind[:3])
		send = []string{"rr-client", "--proto", proto, "--size", "64"}
		recv = []string{"rr-server", "--proto", proto}
	default:
		return nil, nil, fmt.Errorf("no such traffic: %q", t.Kind)
	}
	return send, recv, nil
}
