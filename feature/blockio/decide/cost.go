package decide

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
)

// The assumed sizes of requests if only operations or only bytes are given. Operations have the size by
// which capacities are measured. Bytes come in requests of the largest size that most disks accept.
const (
	SmallRequest = 4 << 10
	largeRequest = 128 << 10
)

// UsualHeadroom is the default part of a capacity that cannot be reserved.
const UsualHeadroom = 0.1

// Capacity is what a disk can do of each kind alone: small requests at random places, and bytes in
// large requests, at the queue depth that gives the most. The cost of a request is linear in its size,
// as in the kernel's iocost (block/blk-iocost.c): a base plus a part for its bytes.
type Capacity struct {
	api.BlockIOFigures
	Headroom float64
	Measured bool
	Realtime Profile `json:",omitempty"`

	Depth1   api.BlockIOFigures `json:"depth_1,omitzero"`  // operations, one request at a time; 0: not known
	Depth    int                `json:"depth,omitempty"`   // queue depth that gave the most; 0: not measured
	Seconds  float64            `json:"seconds,omitempty"` // duration of the measurement of each figure
	Recorded time.Time          `json:"recorded,omitzero"` // when it was measured or given
	Seen     api.BlockIOFigures `json:"seen,omitzero"`     // the highest rates of all I/O together within a second

	assumed bool
}

// Known reports whether the capacity was measured or given.
func (c Capacity) Known() bool { return (c.ReadIOPS > 0 || c.WriteIOPS > 0) && !c.assumed }

// Basis describes the source of the figures.
func (c Capacity) Basis() string {
	when := ""
	if !c.Recorded.IsZero() {
		when = " on " + c.Recorded.UTC().Format(time.DateOnly)
	}
	switch {
	case !c.Known():
		return "nobody has measured it"
	case !c.Measured:
		return "given by an operator" + when
	}
	return fmt.Sprintf("measured%s, each for %.3gs, by reads alone or writes alone past the page cache, at random places: operations of 4 KiB with %d at once, and one at a time; bytes in 128 KiB with 16 at once",
		when, c.Seconds, c.Depth)
}

// OrAssumed returns the capacity if it is known. Otherwise it returns an assumed one, by which I/O can
// be compared: the highest rates seen, or what is reserved, if that is more.
func (c Capacity) OrAssumed(reserved api.BlockIOFigures) Capacity {
	if c.Known() {
		return c
	}
	out := Capacity{Seen: c.Seen, assumed: true, BlockIOFigures: api.BlockIOFigures{
		ReadIOPS:  max(c.Seen.ReadIOPS, reserved.ReadIOPS, reserved.ReadBytes/largeRequest, 1),
		WriteIOPS: max(c.Seen.WriteIOPS, reserved.WriteIOPS, reserved.WriteBytes/largeRequest, 1),
	}}
	out.ReadBytes = max(c.Seen.ReadBytes, reserved.ReadBytes, out.ReadIOPS*SmallRequest)
	out.WriteBytes = max(c.Seen.WriteBytes, reserved.WriteBytes, out.WriteIOPS*SmallRequest)
	return out
}

// requests returns the queue depth that figures need, from the disk's rates at depth 1. ok is false if
// those were not measured.
func (c Capacity) requests(f api.BlockIOFigures) (n float64, ok bool) {
	for _, x := range []struct{ ops, one uint64 }{{f.ReadIOPS, c.Depth1.ReadIOPS}, {f.WriteIOPS, c.Depth1.WriteIOPS}} {
		switch {
		case x.ops == 0:
		case x.one == 0:
			return 0, false
		default:
			n += float64(x.ops) / float64(x.one)
		}
	}
	return n, true
}

// share returns the part of the capacity (1 is all of it) that operations and bytes per second in one
// direction take. Without bytes, the operations are small requests; without operations, the bytes come
// in large ones. If mostBytes is 0, the capacity in bytes is unknown, and share ignores the size of
// requests.
func share(ops, bytes float64, mostOps, mostBytes uint64) float64 {
	if ops == 0 && bytes == 0 {
		return 0
	}
	if ops == 0 {
		ops = bytes / largeRequest
	}
	bytes = max(bytes, ops*SmallRequest) // a smaller request costs no less
	if mostOps == 0 {
		return unaffordable
	}
	if mostBytes == 0 {
		return ops / float64(mostOps)
	}
	perByte := 1 / float64(mostBytes)
	base := max(1/float64(mostOps)-SmallRequest*perByte, 0)
	return ops*base + bytes*perByte
}

// rounding is the rounding error allowed in sums of shares.
const rounding = 1e-9

// unaffordable is the share of figures in a direction in which the disk has no capacity.
const unaffordable = 1e9

// Share returns the part of the capacity that figures take, in total and by direction.
func (c Capacity) Share(f api.BlockIOFigures) (all, reads, writes float64) {
	reads = share(float64(f.ReadIOPS), float64(f.ReadBytes), c.ReadIOPS, c.ReadBytes)
	writes = share(float64(f.WriteIOPS), float64(f.WriteBytes), c.WriteIOPS, c.WriteBytes)
	return reads + writes, reads, writes
}

// free returns the part of the capacity that may be reserved.
func (c Capacity) free() float64 { return 1 - c.Headroom }

// Halves returns the operations per second that can be reserved if reads take one half of the free
// part, and writes the other. known is false if the capacity is unknown.
func (c Capacity) Halves() (f api.BlockIOFigures, known bool) {
	half := c.free() / 2
	return api.BlockIOFigures{ReadIOPS: uint64(half * float64(c.ReadIOPS)), WriteIOPS: uint64(half * float64(c.WriteIOPS))}, c.Known()
}

// Check returns an error if the capacity makes no sense. An unknown capacity may still have Seen.
func (c Capacity) Check() error {
	f := c.BlockIOFigures
	if (f == api.BlockIOFigures{} && c.Seen != api.BlockIOFigures{}) {
		f.ReadIOPS, f.WriteIOPS = 1, 1
	}
	switch {
	case f.ReadIOPS == 0 || f.WriteIOPS == 0:
		return fmt.Errorf("both read and write operations per second must be given")
	case max(f.ReadIOPS, f.WriteIOPS, c.Seen.ReadIOPS, c.Seen.WriteIOPS) > maxIOPS:
		return fmt.Errorf("more than %d operations per second", maxIOPS)
	case max(f.ReadBytes, f.WriteBytes, c.Seen.ReadBytes, c.Seen.WriteBytes) > maxBytes:
		return fmt.Errorf("more than %d bytes per second", maxBytes)
	case f.ReadBytes > 0 && f.ReadBytes < f.ReadIOPS*SmallRequest, f.WriteBytes > 0 && f.WriteBytes < f.WriteIOPS*SmallRequest:
		return fmt.Errorf("fewer bytes than its operations of %d bytes have", SmallRequest)
	case c.Depth1.ReadIOPS > f.ReadIOPS, c.Depth1.WriteIOPS > f.WriteIOPS:
		return fmt.Errorf("more operations one at a time than at the most")
	case c.Depth1.ReadBytes > 0 || c.Depth1.WriteBytes > 0:
		return fmt.Errorf("one at a time only operations count")
	case c.Depth < 0 || c.Depth > maxDepth || c.Measured && c.Depth == 0:
		return fmt.Errorf("%d requests at once are not 1 to %d", c.Depth, maxDepth)
	case !(c.Seconds >= 0 && c.Seconds <= 3600):
		return fmt.Errorf("measured for %v seconds, not 0 to 3600", c.Seconds)
	case !(c.Headroom >= 0 && c.Headroom <= 0.9):
		return fmt.Errorf("headroom %v is not between 0 and 0.9", c.Headroom)
	}
	return c.Realtime.check()
}

// The bounds of figures, equal to those of policy.
const (
	maxIOPS  = 100_000_000
	maxBytes = 1 << 40
	maxDepth = 1 << 16
)

// Holder is a container with a reservation at a disk.
type Holder struct {
	Container container.ID
	Name      string
	Figures   api.BlockIOFigures
}

// Refusal is the error for a reservation that does not fit.
type Refusal struct {
	Device  string
	Want    float64 // share of the capacity
	Left    float64
	Reads   uint64 // small requests that still fit, of one direction alone
	Writes  uint64
	Holders []Holder // the largest first
	shares  []float64
}

// Error says how much is left, and who holds the rest.
func (r *Refusal) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s has %.1f%% of its capacity left (%d read or %d write operations per second), and ", r.Device, 100*r.Left, r.Reads, r.Writes)
	if r.Want >= unaffordable {
		b.WriteString("cannot do what is asked for at all")
	} else {
		fmt.Fprintf(&b, "%.1f%% are asked for", 100*r.Want)
	}
	const most = 8
	for i, h := range r.Holders[:min(len(r.Holders), most)] {
		fmt.Fprintf(&b, "; %q (%s) holds %.1f%%", h.Name, h.Container, 100*r.shares[i])
	}
	if n := len(r.Holders) - most; n > 0 {
		fmt.Fprintf(&b, "; and %d others hold the rest", n)
	}
	return b.String()
}

// Admit returns a *Refusal unless want fits on a disk beside the reservations of others. It admits
// anything on a disk of unknown capacity.
func Admit(device string, c Capacity, others []Holder, want api.BlockIOFigures) error {
	if !c.Known() {
		return nil
	}
	if (want.ReadBytes > 0 && c.ReadBytes == 0) || (want.WriteBytes > 0 && c.WriteBytes == 0) {
		return fmt.Errorf("the capacity of %s in bytes per second is not known, so that none can be reserved: measure it with `fairlead io calibrate %s --scratch DIR`", device, device)
	}
	left := c.free()
	of := func(h Holder) float64 { s, _, _ := c.Share(h.Figures); return s }
	for _, h := range others {
		left -= of(h)
	}
	asked, _, _ := c.Share(want)
	if asked <= left+rounding {
		return nil
	}
	r := &Refusal{Device: device, Want: asked, Left: max(left, 0), Holders: slices.Clone(others)}
	r.Reads, r.Writes = uint64(r.Left*float64(c.ReadIOPS)), uint64(r.Left*float64(c.WriteIOPS))
	slices.SortStableFunc(r.Holders, func(a, b Holder) int {
		return cmp.Compare(of(b), of(a))
	})
	for _, h := range r.Holders {
		r.shares = append(r.shares, of(h))
	}
	return r
}

// The ways in which a reservation is admitted.
const (
	AdmissionVerified   = "verified"   // the disk's capacity, measured or given, has room for it
	AdmissionSeen       = "seen"       // the capacity is not known, but the disk was once seen to do as much as is reserved
	AdmissionUnverified = "unverified" // no one knows whether the disk can do it
	AdmissionExceeded   = "exceeded"   // a capacity given or measured later is less than what is reserved
)

// Admission is how a reservation is admitted.
type Admission struct {
	How  string
	Text string // explanation and advice; may be empty
}

// Limit is what a disk did while its reservations were missed without interference.
type Limit struct {
	Did   api.BlockIOFigures
	Depth float64 // average number of requests in flight
	Taken time.Time
}

// text describes the limit.
func (l Limit) text() string {
	if l.Taken.IsZero() {
		return ""
	}
	return fmt.Sprintf("; while nobody was in the way, it did %s, with %.1f requests under way on average, and that was less than is reserved", countText(l.Did), l.Depth)
}

// Admission returns the admission of a container's own figures on a disk, where all is the sum of the
// reservations there, its own included.
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

// counted names the unit of each figure.
var counted = [...]string{"reads", "writes", "bytes read", "bytes written"}

// each returns pointers to the figures, in the order of counted.
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

// See records the rates within a second. It reports whether a figure has grown enough to be worth a
// write to the file: to the next of eight steps per doubling, on a log scale.
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

// Limits holds what disks did that fell short of their reservations, by disk.
type Limits map[Disk]Limit

// Note updates the limits after a window, with the standings after it. did is the I/O of all containers
// and the host, by disk.
func (limits Limits) Note(w Window, standings map[Place]Standing, did map[Disk]api.BlockIOFigures) {
	type sums struct {
		did, due api.BlockIOFigures
		under    time.Duration
		short    bool // a reservation is missed, and its container waited for the disk
		other    bool // the miss may have another cause
	}
	at := make(map[Disk]*sums)
	for _, d := range w.Demands {
		s := at[d.Disk]
		if s == nil {
			s = &sums{}
			at[d.Disk] = s
		}
		s.did, s.due, s.under = Plus(s.did, d.Achieved), Plus(s.due, d.Reserved), s.under+d.Under
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
		due, _, _ := w.Capacity[disk].Share(s.due)
		if total, _, _ := w.Capacity[disk].Share(did[disk]); total-share >= diskShare {
			s.other = true // a container without a reservation, or the host
		}
		switch l := limits[disk]; {
		case share >= enough*due, !s.short && operations(s.did) > operations(l.Did):
			delete(limits, disk) // the disk does what is reserved, or more than the limit says
		case s.short && !s.other && (l.Taken.IsZero() || operations(s.did) > operations(l.Did)):
			limits[disk] = Limit{s.did, s.under.Seconds() / w.Length.Seconds(), w.Taken}
		}
	}
	maps.DeleteFunc(limits, func(disk Disk, _ Limit) bool { return at[disk] == nil })
}
