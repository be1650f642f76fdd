package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/bench/rig"
)

// session is one rig with a victim at work, an agent, and one kind of traffic
// at a time.
type session struct {
	rig    *rig.Rig
	guard  *guard
	victim *rig.Generator

	kind       rig.Traffic
	sender     *rig.Generator
	receiver   *rig.Generator
	warm, take time.Duration // how long to wait, and to measure

	foreign float64 // most CPUs that anybody else used beside an idle rig
}

func newSession(ctx context.Context, cfg rig.Config, warm, take time.Duration) (_ *session, err error) {
	var r *rig.Rig
	if cfg.Path == rig.Docker {
		r, err = rig.NewDocker(ctx, cfg)
	} else {
		r, err = rig.New(cfg)
	}
	if err != nil {
		return nil, err
	}
	s := &session{rig: r, warm: warm, take: take}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.guard, err = newGuard(ctx, r); err != nil {
		return nil, err
	}
	s.victim, err = r.Start(ctx, r.Victim, "burn")
	return s, err
}

func (s *session) close() error {
	var errs []error
	if s.sender != nil {
		errs = append(errs, s.sender.Stop(), s.receiver.Stop())
	}
	if s.victim != nil {
		errs = append(errs, s.victim.Stop())
	}
	if s.guard != nil {
		errs = append(errs, s.guard.stop())
	}
	return errors.Join(append(errs, s.rig.Close())...)
}

// traffic makes kind the kind of traffic, paused.
func (s *session) traffic(ctx context.Context, kind rig.Traffic) error {
	if s.kind == kind {
		return nil
	}
	if s.sender != nil {
		err := errors.Join(s.sender.Stop(), s.receiver.Stop())
		s.sender, s.receiver, s.kind = nil, nil, ""
		if err != nil {
			return err
		}
	}
	send, recv, err := s.rig.Send(ctx, kind)
	if err != nil {
		return err
	}
	s.kind, s.sender, s.receiver = kind, send, recv
	return nil
}

// sample is what was measured in one window.
type sample struct {
	work     float64 // units per second of the victim
	sent     float64 // per second
	received float64 // per second
	bits     float64 // per second, received
	p50, p99 float64 // of the requests, in seconds; 0 if there are none
}

// measure lets the traffic run at a rate, with the protection on or off, and
// measures after a while.
func (s *session) measure(ctx context.Context, kind rig.Traffic, rate uint64, on bool) (sample, error) {
	if err := s.traffic(ctx, kind); err != nil {
		return sample{}, err
	}
	if s.guard.on != on {
		// How long the switching takes under load is not what is measured.
		s.sender.SetRate(0)
		if err := s.guard.set(ctx, on); err != nil {
			return sample{}, err
		}
	}
	s.sender.SetRate(rate)
	if err := sleep(ctx, s.warm); err != nil {
		return sample{}, err
	}
	cpu := readCPU()
	v, tx, rx := s.victim.Read(), s.sender.Read(), s.receiver.Read()
	err := sleep(ctx, s.take)
	victim, sent, received := s.victim.Read().Since(v), s.sender.Read().Since(tx), s.receiver.Read().Since(rx)
	if err != nil {
		return sample{}, err
	}
	for _, g := range []*rig.Generator{s.victim, s.sender, s.receiver} {
		select {
		case <-g.Done():
			return sample{}, fmt.Errorf("a load generator has ended: %w", g.Wait())
		default:
		}
	}
	if rate == 0 {
		own := float64(s.rig.VictimShare) / 100
		s.foreign = max(s.foreign, readCPU().busySince(cpu)-own)
	}
	m := sample{
		// A victim that got nowhere has an infinite penalty, which no table
		// can show; one unit of work is as good as none.
		work: max(victim.Rate(), 1/victim.Seconds),
		sent: sent.Rate(), received: received.Rate(), bits: received.BitRate(),
		p50: sent.Latency(0.5).Seconds(), p99: sent.Latency(0.99).Seconds(),
	}
	return m, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
