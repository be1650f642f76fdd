package blockio

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/policy"
)

// standing returns how a reservation stands. The caller holds f.mu.
func (f *BlockIO) standing(id container.ID, r reservation) decide.Standing {
	if f.lost(r) {
		return decide.Standing{
			State: decide.StateLost, Evidence: fmt.Sprintf("%s is not the disk any more that it was, or has none in it", r.device),
			Mend: "bring the disk back, or reserve of the one that is there",
		}
	}
	s := f.standings[decide.Place{Container: id, Disk: r.at()}]
	s.State = cmp.Or(s.State, decide.StateIdle)
	return s
}

// lost reports whether the disk of a reservation has gone, or another is in its place.
func (f *BlockIO) lost(r reservation) bool {
	now, err := block.Find(f.cfg.Roots.Sys, r.disk.Major, r.disk.Minor)
	return err != nil || now.Identity() != r.disk.Identity() || now.Sequence != r.disk.Sequence
}

// unmet returns a feature.ErrPartly that lists the missed reservations of a container, with the
// reason and the remedy, or nil.
func (f *BlockIO) unmet(m *managed) error {
	_, reasons := f.missed(m)
	if reasons == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", feature.ErrPartly, strings.Join(reasons, "; "))
}

// told is what a container's status last reported as missed, and when.
type told struct {
	what string
	at   time.Time
}

// tellAgain is how long a status stays as it is at least.
const tellAgain = 5 * time.Second

// tellChanged asks for another Apply of containers whose status is not what Apply reported: a name in
// their policy has come to lead to another disk, to none, or to a disk again (the kernel drops limits
// together with a disk); a reservation is newly missed, met again, or missed for another reason; or,
// once the last window has been judged, a reservation is admitted otherwise. The caller holds f.mu.
func (f *BlockIO) tellChanged(now time.Time, judged bool) {
	same := func(a, b block.Disk) bool { return a.Number() == b.Number() && a.Sequence == b.Sequence }
	for id, m := range f.managed {
		changed := judged && slices.ContainsFunc(m.reserved, func(r reservation) bool { return f.admission(r).How != r.told })
		if at := f.disks(m.target.Settings); !maps.EqualFunc(at, m.at, same) {
			m.at, changed = at, true // Apply may be long in coming
		}
		if what, _ := f.missed(m); what != m.told.what && now.Sub(m.told.at) >= tellAgain {
			m.told, changed = told{what, now}, true
		}
		if changed {
			f.changed(id)
		}
	}
}

// missed names the missed reservations of a container, and why. what stays the same while figures
// alone change.
func (f *BlockIO) missed(m *managed) (what string, reasons []string) {
	for _, r := range m.reserved {
		if s := f.standing(m.target.Container.ID, r); s.Missed() {
			what += fmt.Sprintln(r.device, s.State, s.Culprit, s.Mend)
			reasons = append(reasons, fmt.Sprintf("io.reserve of %s is %s: %s; %s", r.device, s.State, s.Evidence, s.Mend))
		}
	}
	if len(m.reserved) > 0 && f.failed != "" {
		what += f.failed
		reasons = append(reasons, "whether io.reserve is met is not known: "+f.failed)
	}
	return what, reasons
}

// disks returns the disks that settings name now, by name; zero where there is none.
func (f *BlockIO) disks(s policy.Settings) map[string]block.Disk {
	at := make(map[string]block.Disk, len(s.IO))
	for _, io := range s.IO {
		at[io.Device], _ = block.Open(f.cfg.Roots.Sys, io.Device) // Apply reports the error
	}
	return at
}
