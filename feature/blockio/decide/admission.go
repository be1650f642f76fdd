package decide

import (
	"fmt"
	"maps"
	"math"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// The ways in which a reservation is admitted.
const (
	AdmissionVerified   = "verified"   // the disk's capacity, measured or given, has room for it
	AdmissionSeen       = "seen"       // the capacity is not known, but the disk has done at once as much as is reserved
	AdmissionUnverified = "unverified" // it is not known whether the disk can do that
	AdmissionExceeded   = "exceeded"   // the capacity was given or measured later, and is less than what is reserved
)

// Admission is how a reservation is admitted.
type Admission struct {
	How  string
	Text string // what to know and to do about it; may be empty
}

// Limit is what a disk did while its reservations were missed and nothing was in the way.
type Limit struct {
	Did   api.BlockIOFigures
	Depth float64 // average number of requests under way
	Taken time.Time
}

// text describes the limit.
func (l Limit) text() string {
	if l.Taken.IsZero() {
		return ""
	}
	return fmt.Sprintf("; while nobody was in the way, it did %s, with %.1f requests under way on average, and that was less than is reserved", countText(l.Did), l.Depth)
}

// Admission returns how a container's own figures are admitted at a disk, if all figures
// reserved there, its own included, come to all.
func (c Capacity) Admission(device string, own, all api.BlockIOFigures, l Limit) Admission {
	if c.Known() {
		if share, _, _ := c.Share(all); share > c.free()+rounding {
			return Admission{AdmissionExceeded, fmt.Sprintf("%.0f%% of what %s can do are reserved of it, and %.0f%% can be: reserve less of it", 100*share, device, 100*c.free())}
		}
		a := Admission{How: AdmissionVerified}
		if n, ok := c.requests(own); ok && n > 1 {
			a.Text = fmt.Sprintf("it takes at least %.0f requests under way at once: one at a time %s does %s", math.Ceil(n), device, countText(c.Depth1))
		}
		return a
	}
	verify := fmt.Sprintf("verify it with `fairlead io calibrate %s --scratch DIR`, where DIR is a directory on that disk", device)
	seen := Capacity{BlockIOFigures: c.Seen}
	if share, _, _ := seen.Share(all); share <= 1 && l.Taken.IsZero() {
		return Admission{AdmissionSeen, fmt.Sprintf("%s has done as much at once as is reserved of it (%s), and nobody has measured what it can do: %s", device, countText(c.Seen), verify)}
	}
	done := "it has done nothing yet"
	if c.Seen != (api.BlockIOFigures{}) {
		done = "it has done at most " + countText(c.Seen) + " at once"
	}
	return Admission{AdmissionUnverified, fmt.Sprintf("nobody has measured what %s can do: %s are reserved of it in all, and %s%s; %s", device, countText(all), done, l.text(), verify)}
}

// counted says what the figures of each count.
var counted = [...]string{"reads", "writes", "bytes read", "bytes written"}

// each returns figures one by one.
func each(f *api.BlockIOFigures) [len(counted)]*uint64 {
	return [...]*uint64{&f.ReadIOPS, &f.WriteIOPS, &f.ReadBytes, &f.WriteBytes}
}

// countText describes figures.
func countText(f api.BlockIOFigures) string {
	var parts []string
	for i, n := range each(&f) {
		if *n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", *n, counted[i]))
		}
	}
	if parts == nil {
		return "nothing"
	}
	return strings.Join(parts, ", ") + " a second"
}

func operations(f api.BlockIOFigures) uint64 { return f.ReadIOPS + f.WriteIOPS }

// Plus adds figures.
func Plus(a, b api.BlockIOFigures) api.BlockIOFigures {
	return api.BlockIOFigures{
		ReadIOPS: a.ReadIOPS + b.ReadIOPS, WriteIOPS: a.WriteIOPS + b.WriteIOPS, ReadBytes: a.ReadBytes + b.ReadBytes, WriteBytes: a.WriteBytes + b.WriteBytes,
	}
}

// See records what was done within a second. It reports whether a figure has grown by enough
// to be worth writing to a file: by an eighth of the way to twice as much, on a log scale.
func (c *Capacity) See(n api.BlockIOFigures) (more bool) {
	most := [...]uint64{maxIOPS, maxIOPS, maxBytes, maxBytes}
	for i, seen := range each(&c.Seen) {
		if n := min(*each(&n)[i], most[i]); n > *seen {
			const steps = 8
			step := func(n uint64) int { return int(steps * math.Log2(float64(n+1))) }
			more = more || step(n) > step(*seen)
			*seen = n
		}
	}
	return more
}

// Limits are what disks did that are short of their reservations, by disk.
type Limits map[Disk]Limit

// Note updates the limits after a window. standings says how the reservations stand after it.
// did is what all containers and the host did at each disk, and reserved is what all
// containers have reserved of it.
func (limits Limits) Note(w Window, standings map[Place]Standing, did, reserved map[Disk]api.BlockIOFigures) {
	type sums struct {
		did   api.BlockIOFigures
		under time.Duration
		short bool // a reservation is missed, and its container waited for the disk
		other bool // something else may be the reason
	}
	at := make(map[Disk]*sums)
	for _, d := range w.Demands {
		s := at[d.Disk]
		if s == nil {
			s = &sums{}
			at[d.Disk] = s
		}
		s.did, s.under = Plus(s.did, d.Achieved), s.under+d.Under
		switch standings[Place{d.Container, d.Disk}].State {
		case StateShort:
			s.short = s.short || d.Under >= time.Duration(busyShare*float64(w.Length))
		case StateMet, StateIdle:
		default:
			s.other = true
		}
	}
	for disk, s := range at {
		share, _, _ := w.Capacity[disk].Share(s.did)
		due, _, _ := w.Capacity[disk].Share(reserved[disk])
		if total, _, _ := w.Capacity[disk].Share(did[disk]); total-share >= diskShare {
			s.other = true // a container without a reservation, or the host
		}
		switch l := limits[disk]; {
		case share >= enough*due, !s.short && operations(s.did) > operations(l.Did):
			delete(limits, disk) // the disk does what is reserved
		case s.short && !s.other && (l.Taken.IsZero() || operations(s.did) > operations(l.Did)):
			limits[disk] = Limit{s.did, s.under.Seconds() / w.Length.Seconds(), w.Taken}
		}
	}
	maps.DeleteFunc(limits, func(disk Disk, _ Limit) bool { return at[disk] == nil })
}
