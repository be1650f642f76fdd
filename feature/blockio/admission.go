package blockio

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/policy"
)

// The ways in which a reservation is admitted.
const (
	admissionVerified   = "verified"   // the disk's capacity, measured or given, has room for it
	admissionSeen       = "seen"       // that is not known, but the disk has done as much at once as is reserved
	admissionUnverified = "unverified" // nobody knows whether the disk can do that
	admissionExceeded   = "exceeded"   // the capacity was given or measured since, and is less than what is reserved
)

// Admission is how a reservation is admitted.
type Admission struct {
	How  string
	Text string // what to know of it, and to do; "": nothing
}

// limit is what a disk did while its reservations were missed and nobody was in the way.
type limit struct {
	did   api.BlockIOFigures
	depth float64 // requests under way on average
	taken time.Time
}

// text says what was seen.
func (l limit) text() string {
	if l.taken.IsZero() {
		return ""
	}
	return fmt.Sprintf("; while nobody was in the way, it did %s, with %.1f requests under way on average, and that was less than is reserved", countText(l.did), l.depth)
}

// admit says how figures are admitted at a disk of which containers have reserved so much,
// themselves included.
func (c Capacity) admit(device string, own, all api.BlockIOFigures, l limit) Admission {
	if c.Known() {
		if share, _, _ := c.Share(all); share > c.free()+rounding {
			return Admission{admissionExceeded, fmt.Sprintf("%.0f%% of what %s can do are reserved of it, and %.0f%% can be: reserve less of it", 100*share, device, 100*c.free())}
		}
		a := Admission{How: admissionVerified}
		if n, ok := c.requests(own); ok && n > 1 {
			a.Text = fmt.Sprintf("it takes at least %.0f requests under way at once: one at a time %s does %s", math.Ceil(n), device, countText(c.Depth1))
		}
		return a
	}
	verify := fmt.Sprintf("verify it with `fairlead io calibrate %s --scratch DIR`, where DIR is a directory on that disk", device)
	seen := Capacity{BlockIOFigures: c.Seen}
	if share, _, _ := seen.Share(all); share <= 1 && l.taken.IsZero() {
		return Admission{admissionSeen, fmt.Sprintf("%s has done as much at once as is reserved of it (%s), and nobody has measured what it can do: %s", device, countText(c.Seen), verify)}
	}
	done := "it has done nothing yet"
	if c.Seen != (api.BlockIOFigures{}) {
		done = "it has done at most " + countText(c.Seen) + " at once"
	}
	return Admission{admissionUnverified, fmt.Sprintf("nobody has measured what %s can do: %s are reserved of it in all, and %s%s; %s", device, countText(all), done, l.text(), verify)}
}

// countText is what figures say in words.
func countText(f api.BlockIOFigures) string {
	var parts []string
	for _, x := range []struct {
		n    uint64
		what string
	}{{f.ReadIOPS, "reads"}, {f.WriteIOPS, "writes"}, {f.ReadBytes, "bytes read"}, {f.WriteBytes, "bytes written"}} {
		if x.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", x.n, x.what))
		}
	}
	if parts == nil {
		return "nothing"
	}
	return strings.Join(parts, ", ") + " a second"
}

func operations(f api.BlockIOFigures) uint64 { return f.ReadIOPS + f.WriteIOPS }

// plus adds figures.
func plus(a, b api.BlockIOFigures) api.BlockIOFigures {
	return api.BlockIOFigures{
		ReadIOPS: a.ReadIOPS + b.ReadIOPS, WriteIOPS: a.WriteIOPS + b.WriteIOPS, ReadBytes: a.ReadBytes + b.ReadBytes, WriteBytes: a.WriteBytes + b.WriteBytes,
	}
}

// reservedOf is what containers have reserved of a disk in all. The caller holds f.mu.
func (f *BlockIO) reservedOf(at monitor.Disk) (sum api.BlockIOFigures) {
	for _, h := range f.holders(at, 0) {
		sum = plus(sum, h.Figures)
	}
	return sum
}

// working is the capacity by which the I/O at a disk is compared. The caller holds f.mu.
func (f *BlockIO) working(d block.Disk) Capacity {
	return f.capacity(d).OrAssumed(f.reservedOf(monitor.Disk{Major: d.Major, Minor: d.Minor}))
}

// admission says how a reservation is admitted. The caller holds f.mu.
func (f *BlockIO) admission(r reservation) Admission {
	return f.capacity(r.disk).admit(r.device, r.figures, f.reservedOf(r.at()), f.limits[r.at()])
}

// unverified says which reservations nobody knows to be possible; nil: none.
func (f *BlockIO) unverified(t policy.Target) error {
	var errs []error
	reserved := f.members[t.Container.ID].reserved
	for i, r := range reserved {
		a := f.admission(r)
		reserved[i].told = a.How
		if a.How == admissionUnverified {
			errs = append(errs, errors.New(a.Text))
		}
	}
	if errs == nil {
		return nil
	}
	return fmt.Errorf("%w: io.reserve is protected, but unverified: %w", feature.ErrPartly, errors.Join(errs...))
}

// readmit has Apply called for the reservations that are admitted otherwise than it said.
// The caller holds f.mu.
func (f *BlockIO) readmit() {
	for id, m := range f.members {
		if slices.ContainsFunc(m.reserved, func(r reservation) bool { return f.admission(r).How != r.told }) {
			f.changed(id)
		}
	}
}

// leastLearnt is the shortest window from which rates are learnt.
const leastLearnt = 500 * time.Millisecond

// learn notes the most that was done at each disk at once. The caller holds f.mu.
func (f *BlockIO) learn(accounts []monitor.Account, length time.Duration) {
	if length < leastLearnt {
		return
	}
	did := make(map[monitor.Disk]api.BlockIOFigures)
	for _, a := range accounts {
		did[a.Disk] = plus(did[a.Disk], achieved(a, length))
	}
	for at, n := range did {
		d, err := block.Find(f.cfg.Roots.Sys, at.Major, at.Minor)
		if err != nil || n == (api.BlockIOFigures{}) {
			continue // it has vanished
		}
		c := f.capacity(d)
		if !c.see(n) {
			f.capacities.of[d.Identity()] = c
			continue
		}
		if err := f.capacities.set(d.Identity(), c); err != nil {
			f.tell(fmt.Errorf("what %s was seen to do is not kept: %w", d.Name, err))
		}
	}
}

// see notes what was done at once, and reports whether that is more than before by enough to
// be written to a file: one of eight steps to twice as much.
func (c *Capacity) see(n api.BlockIOFigures) (more bool) {
	for _, x := range []struct {
		seen *uint64
		n    uint64
		most uint64
	}{
		{&c.Seen.ReadIOPS, n.ReadIOPS, maxIOPS}, {&c.Seen.WriteIOPS, n.WriteIOPS, maxIOPS},
		{&c.Seen.ReadBytes, n.ReadBytes, maxBytes}, {&c.Seen.WriteBytes, n.WriteBytes, maxBytes},
	} {
		if n := min(x.n, x.most); n > *x.seen {
			const steps = 8
			step := func(n uint64) int { return int(steps * math.Log2(float64(n+1))) }
			more = more || step(n) > step(*x.seen)
			*x.seen = n
		}
	}
	return more
}

// limit notes what disks did whose reservations were missed without anybody in the way, for
// as long as that has not changed. The caller holds f.mu.
func (f *BlockIO) limit(w Window) {
	type sums struct {
		did   api.BlockIOFigures
		under time.Duration
		short bool // one was missed, which waited for the disk
		other bool // or for something else
	}
	at := make(map[monitor.Disk]*sums)
	all := make(map[monitor.Disk]api.BlockIOFigures)
	for _, a := range f.shown.Accounts {
		all[a.Disk] = plus(all[a.Disk], achieved(a, w.Length))
	}
	for _, d := range w.Demands {
		s := at[d.Disk]
		if s == nil {
			s = &sums{}
			at[d.Disk] = s
		}
		s.did, s.under = plus(s.did, d.Achieved), s.under+d.Under
		switch f.control.standing[Place{d.Container, d.Disk}].State {
		case stateShort:
			s.short = s.short || d.Under >= time.Duration(busyShare*float64(w.Length))
		case stateMet, stateIdle:
		default:
			s.other = true
		}
	}
	for disk, s := range at {
		share, _, _ := w.Capacity[disk].Share(s.did)
		reserved, _, _ := w.Capacity[disk].Share(f.reservedOf(disk))
		if total, _, _ := w.Capacity[disk].Share(all[disk]); total-share >= diskShare {
			s.other = true // somebody without a reservation, or the host
		}
		switch l := f.limits[disk]; {
		case share >= enough*reserved, !s.short && operations(s.did) > operations(l.did):
			delete(f.limits, disk) // it does give that
		case s.short && !s.other && (l.taken.IsZero() || operations(s.did) > operations(l.did)):
			f.limits[disk] = limit{s.did, s.under.Seconds() / w.Length.Seconds(), w.Taken}
		}
	}
	for disk := range f.limits {
		if at[disk] == nil {
			delete(f.limits, disk)
		}
	}
}
