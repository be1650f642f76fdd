package bench

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead-project/fairlead/api"
)

// heard compares what the agent says of the senders of a case with their own counts, from listen to
// figures. Close it.
type heard struct {
	s      *trafficSession
	before api.Frame
	logs   map[string]*worklog // by container
}

// frame is what the agent says now.
func (g *guard) frame(ctx context.Context) (api.Frame, error) {
	f, err := g.client.Frame(ctx)
	if err != nil {
		err = g.explain(fmt.Errorf("read what the agent says: %w", err))
	}
	return f, err
}

// listen begins the comparison.
func (s *trafficSession) listen(ctx context.Context) (*heard, error) {
	h := &heard{s: s, logs: make(map[string]*worklog)}
	for name, f := range s.load {
		switch {
		case f.to == nil: // a real server counts otherwise
		case f.args[0] == "rr-client":
			h.logs[name] = newWorklog(f.from.Ops)
		default:
			h.logs[name] = newWorklog(f.to.Bytes)
		}
	}
	var err error
	if h.before, err = s.guard.frame(ctx); err != nil {
		h.close()
	}
	return h, err
}

func (h *heard) close() {
	for _, l := range h.logs {
		l.Close()
	}
}

// figures returns what the victim of a phase has lost, and what the agent says: of the container
// with the measured requests, or of the one of which the agent is furthest from the truth. A
// container can lose only what it is guaranteed, and what the uplink carried: the rest is nobody's.
func (h *heard) figures(ctx context.Context, c trafficCase, p phase) ([]figure, error) {
	after, err := h.s.guard.frame(ctx)
	if err != nil {
		return nil, err
	}
	got, total := make(map[string]float64), 0.0
	for name, l := range h.logs {
		if got[name] = l.rate(h.before.Taken, after.Taken); name != c.probe {
			got[name] *= 8
			total += got[name]
		}
	}
	var worst []figure
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if !slices.Contains(p.sends, name) || c.probe != "" && name != c.probe {
			continue
		}
		row, calm := said(h.before, after, h.s.rig.Prefix()+name), h.s.calm
		if name != c.probe {
			full := total
			if due := float64(row.Egress.Due); due > 0 {
				full = min(total, due*ofTCP)
			}
			calm = undisturbed{work: max(full, got[name])}
		}
		if f := calm.slowedFigures(got[name], row.Slowed); worst == nil || len(f) > 0 && f[2].value > worst[2].value {
			worst = f
		}
	}
	return worst, nil
}

// alone measures the requests of a case without neighbours.
func (s *trafficSession) alone(ctx context.Context, c trafficCase) (err error) {
	s.calm = undisturbed{}
	if f := s.load[c.probe]; f == nil || f.to == nil {
		return nil
	}
	s.sends([]string{c.probe})
	if err := sleep(ctx, s.settle); err != nil {
		return err
	}
	h, err := s.listen(ctx)
	if err != nil {
		return err
	}
	defer h.close()
	if err := sleep(ctx, s.take); err != nil {
		return err
	}
	after, err := s.guard.frame(ctx)
	if err != nil {
		return err
	}
	s.calm = undisturbed{h.logs[c.probe].rate(h.before.Taken, after.Taken), said(h.before, after, s.rig.Prefix()+c.probe).Slowed}
	return nil
}
