package blockio

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/policy"
)

// missed says whether a reservation does not hold: more is asked for than is given.
func (s Standing) missed() bool {
	return !slices.Contains([]string{"", stateMet, stateIdle, stateLess}, s.State)
}

// mend says what would have a reservation met, or what is done about it, after the actions
// of this window.
func (c *Control) mend(w Window, d Demand, s Standing) string {
	switch h := c.helpOf(d.Container); {
	case h.lack != "" && s.State == stateContended:
		return h.lack + "; " + c.mendOthers(w, d, s)
	case h.level != "":
		return "it is helped itself (io.help)"
	}
	return c.mendOthers(w, d, s)
}

// mendOthers is mend, without what may be done for the container itself.
func (c *Control) mendOthers(w Window, d Demand, s Standing) string {
	own := d.Waited[d.Container] >= time.Duration(waitedShare*float64(w.Length))
	switch {
	case s.State != stateContended && own:
		return "give it more CPUs, or let fewer of its threads compute"
	case s.State != stateContended:
		return "reserve no more than the disk does of what it asks for (fairlead io calibrate measures the disk)"
	case s.Culprit == monitor.System:
		return "see what the host does there: fairlead io -v"
	}
	n, a := w.Neighbours[s.Culprit], c.acting[s.Culprit]
	switch {
	case a != nil && a.released.IsZero() && !a.none():
		return fmt.Sprintf("%s is held back for it", w.name(s.Culprit))
	case n.Reserved:
		return fmt.Sprintf("move it or %s to another host or disk: both have reserved I/O", w.name(s.Culprit))
	case n.Yield != policy.YieldAuto:
		return fmt.Sprintf("let %s yield: io.yield=auto", w.name(s.Culprit))
	}
	return fmt.Sprintf("move it or %s to another host or disk", w.name(s.Culprit))
}

// standing says how a reservation stands. The caller holds f.mu.
func (f *BlockIO) standing(id container.ID, r reservation) Standing {
	if f.lost(r) {
		return Standing{
			State: stateLost, Evidence: fmt.Sprintf("%s is not the disk any more that it was, or has none in it", r.device),
			Mend: "bring the disk back, or reserve of the one that is there",
		}
	}
	s := f.control.standing[Place{id, r.at()}]
	s.State = cmp.Or(s.State, stateIdle)
	return s
}

// lost says whether the disk of a reservation has gone, or another is in its place.
func (f *BlockIO) lost(r reservation) bool {
	now, err := block.Find(f.cfg.Roots.Sys, r.disk.Major, r.disk.Minor)
	return err != nil || now.Identity() != r.disk.Identity() || now.Sequence != r.disk.Sequence
}

// unmet says which reservations of a container are missed, why, and what would mend it; nil:
// none is.
func (f *BlockIO) unmet(t policy.Target) error {
	m := f.members[t.Container.ID]
	var reasons []string
	for _, r := range m.reserved {
		if s := f.standing(t.Container.ID, r); s.missed() {
			reasons = append(reasons, fmt.Sprintf("io.reserve of %s is %s: %s; %s", r.device, s.State, s.Evidence, s.Mend))
		}
	}
	if len(m.reserved) > 0 && f.failed != "" {
		reasons = append(reasons, "whether io.reserve is met is not known: "+f.failed)
	}
	if reasons == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", feature.ErrPartly, strings.Join(reasons, "; "))
}

// told is what a container's status was asked to say, and when.
type told struct {
	what string
	at   time.Time
}

// tellAgain is how long a status stays as it is at least.
const tellAgain = 5 * time.Second

// tellMissed has the status of those containers brought up to date whose reservations are
// missed now, or are no more, or for another reason. The caller holds f.mu.
func (f *BlockIO) tellMissed(now time.Time) {
	for id, m := range f.members {
		var what strings.Builder
		for _, r := range m.reserved {
			if s := f.standing(id, r); s.missed() {
				fmt.Fprintln(&what, r.device, s.State, s.Culprit, s.Mend)
			}
		}
		if len(m.reserved) > 0 {
			what.WriteString(f.failed)
		}
		if f.changed == nil || what.String() == m.told.what || now.Sub(m.told.at) < tellAgain {
			continue
		}
		m.told = told{what.String(), now}
		f.changed(id)
	}
}
