package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/policy"
)

// missed reports whether a reservation does not hold: more is asked for than is given.
func (s Standing) Missed() bool {
	return !slices.Contains([]string{"", StateMet, StateIdle, StateLess}, s.State)
}

// mend says what would have a reservation met, or what is done about it, after the actions
// of this window.
func (c *Control) mend(w Window, d Demand, s Standing) string {
	switch h := c.helpOf(d.Container); {
	case h.lack != "" && s.State == StateContended:
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
	case s.State != StateContended && own:
		return "give it more CPUs, or let fewer of its threads compute"
	case s.State != StateContended:
		return "reserve no more than the disk does of what it asks for (fairlead io calibrate measures the disk)"
	case s.Culprit == System:
		return "see what the host does there: fairlead io -v"
	}
	n, a := w.Neighbours[s.Culprit], c.acting[s.Culprit]
	switch {
	case a != nil && a.released.IsZero() && !a.None():
		return fmt.Sprintf("%s is held back for it", w.name(s.Culprit))
	case n.Reserved:
		return fmt.Sprintf("move it or %s to another host or disk: both have reserved I/O", w.name(s.Culprit))
	case n.Yield != policy.YieldAuto:
		return fmt.Sprintf("let %s yield: io.yield=auto", w.name(s.Culprit))
	}
	return fmt.Sprintf("move it or %s to another host or disk", w.name(s.Culprit))
}
