package blockio

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// reservation is a container's reservation of one disk.
type reservation struct {
	device  string // by the name that policy uses
	disk    block.Disk
	figures api.BlockIOFigures
	told    string // the admission that Apply last reported
}

func (r reservation) at() decide.Disk { return decide.Disk{Major: r.disk.Major, Minor: r.disk.Minor} }

// reserve reserves what a container's Target asks for. If that is refused, the container keeps its
// earlier reservation. The error is a feature.ErrPartly if the Target asks for just that one.
func (f *BlockIO) reserve(m *managed) error {
	asked := asks(m.target.Settings)
	reserved, err := f.admit(m.target.Container.ID, asked)
	if err == nil {
		m.reserved = reserved
		return nil
	}
	if slices.EqualFunc(asked, m.reserved, func(a, b reservation) bool { return a.device == b.device && a.figures == b.figures }) {
		return fmt.Errorf("%w: io.reserve: it stays as it was admitted, but now: %w", feature.ErrPartly, err)
	}
	return err
}

// asks returns what settings reserve, still without disks.
func asks(s policy.Settings) (all []reservation) {
	for _, io := range s.IO {
		if figures := api.BlockIOFigures(io.Reserved); figures != (api.BlockIOFigures{}) {
			all = append(all, reservation{device: io.Device, figures: figures})
		}
	}
	return all
}

// admit finds the disks for the requested reservations. It returns an error unless all of them fit.
func (f *BlockIO) admit(id container.ID, asked []reservation) (all []reservation, err error) {
	for _, r := range asked {
		if r.disk, err = block.Open(f.cfg.Roots.Sys, r.device); err != nil {
			return nil, err
		}
		if r.disk.Size == 0 {
			return nil, fmt.Errorf("%s: there is no disk in it", r.device)
		}
		if i := slices.IndexFunc(all, func(o reservation) bool { return o.at() == r.at() }); i >= 0 {
			return nil, fmt.Errorf("%s and %s are both on %s: reserve in one place", all[i].device, r.device, r.disk.Name)
		}
		others := f.holders(r.at(), id)
		if err := decide.Admit(r.device, f.capacity(r.disk), others, r.figures); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

func (f *BlockIO) capacity(d block.Disk) decide.Capacity { return f.capacities.of[d.Identity()] }

// holders returns all containers but one that have a reservation of a disk.
func (f *BlockIO) holders(d decide.Disk, but container.ID) (out []decide.Holder) {
	for id, m := range f.managed {
		for _, r := range m.reserved {
			if id != but && r.at() == d {
				out = append(out, decide.Holder{Container: id, Name: m.target.Container.Name, Figures: r.figures})
			}
		}
	}
	slices.SortFunc(out, func(a, b decide.Holder) int { return int(int64(a.Container) - int64(b.Container)) })
	return out
}

// reservedOf returns the sum of all reservations of a disk. The caller holds f.mu.
func (f *BlockIO) reservedOf(at decide.Disk) (sum api.BlockIOFigures) {
	for _, h := range f.holders(at, 0) {
		sum = decide.Plus(sum, h.Figures)
	}
	return sum
}

// admission returns how a reservation is admitted. The caller holds f.mu.
func (f *BlockIO) admission(r reservation) decide.Admission {
	return f.capacity(r.disk).Admission(r.device, r.figures, f.reservedOf(r.at()), f.limits[r.at()])
}

// unverified returns a feature.ErrPartly that lists the unverified reservations, or nil.
func (f *BlockIO) unverified(m *managed) error {
	var errs []error
	for i, r := range m.reserved {
		a := f.admission(r)
		m.reserved[i].told = a.How
		if a.How == decide.AdmissionUnverified {
			errs = append(errs, errors.New(a.Text))
		}
	}
	if errs == nil {
		return nil
	}
	return fmt.Errorf("%w: io.reserve is protected, but unverified: %w", feature.ErrPartly, errors.Join(errs...))
}

// leastLearnt is the shortest window from which learn takes rates.
const leastLearnt = 500 * time.Millisecond

// learn records the highest rates seen on each disk. The caller holds f.mu.
func (f *BlockIO) learn(accounts []monitor.Account, length time.Duration) {
	if length < leastLearnt {
		return
	}
	for at, n := range didAt(accounts, length) {
		d, err := block.Find(f.cfg.Roots.Sys, at.Major, at.Minor)
		if err != nil || n == (api.BlockIOFigures{}) {
			continue // the disk has vanished, or was idle
		}
		c := f.capacity(d)
		if !c.See(n) {
			f.capacities.of[d.Identity()] = c
			continue
		}
		if err := f.capacities.set(d.Identity(), c); err != nil {
			f.tell(fmt.Errorf("what %s was seen to do is not kept: %w", d.Name, err))
		}
	}
}

// didAt returns the rates of all I/O on each disk.
func didAt(accounts []monitor.Account, length time.Duration) map[decide.Disk]api.BlockIOFigures {
	did := make(map[decide.Disk]api.BlockIOFigures)
	for _, a := range accounts {
		did[a.Disk] = decide.Plus(did[a.Disk], achieved(a, length))
	}
	return did
}

// capacities holds the capacities of disks, by block.Disk's Identity, and the file that keeps them when
// the agent or the host restarts.
type capacities struct {
	file kernel.StateFile
	of   map[string]decide.Capacity
}

// capacitiesFile is the form of the file.
type capacitiesFile struct {
	Version int                        `json:"version"`
	Disks   map[string]decide.Capacity `json:"disks"`
}

const capacitiesVersion = 2

// maxCapacities bounds the file, in bytes.
const maxCapacities = 1 << 20

// loadCapacities rejects the whole file if one entry is wrong.
func loadCapacities(path string) (capacities, error) {
	c := capacities{file: kernel.StateFile{Path: path, Most: maxCapacities, Durable: true}, of: make(map[string]decide.Capacity)}
	var in capacitiesFile
	if found, err := c.file.Read(&in); err != nil || !found {
		return c, err
	}
	if in.Version != capacitiesVersion {
		return c, fmt.Errorf("read %s: it is of version %d, and this agent knows version %d", path, in.Version, capacitiesVersion)
	}
	for id, of := range in.Disks {
		if err := of.Check(); err != nil {
			return c, fmt.Errorf("read %s: %q: %w", path, id, err)
		}
	}
	if in.Disks != nil {
		c.of = in.Disks
	}
	return c, nil
}

// set records the capacity of a disk. If the file cannot be written, nothing changes.
func (c *capacities) set(id string, of decide.Capacity) error {
	was, had := c.of[id]
	c.of[id] = of
	err := os.MkdirAll(filepath.Dir(c.file.Path), 0o755)
	if err == nil {
		err = c.file.Write(capacitiesFile{capacitiesVersion, c.of})
	}
	if err != nil {
		if delete(c.of, id); had {
			c.of[id] = was
		}
	}
	return err
}

// Guarantees implements feature.Guarantor: reads and writes per second of the disks that the operator
// named, if their capacity is known. Reads and writes share a disk, but a scheduler counts each by
// itself. So Guarantees offers reads one half of what can be reserved, and writes the other.
func (f *BlockIO) Guarantees() (map[string]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make(map[string]uint64)
	var errs []error
	for name, device := range f.cfg.Disks {
		d, err := block.Open(f.cfg.Roots.Sys, device)
		if err != nil {
			errs = append(errs, fmt.Errorf("disk %s: %w", name, err)) // it has vanished, or has not come yet
			continue
		}
		half, known := f.capacity(d).Halves()
		if !known {
			errs = append(errs, fmt.Errorf("disk %s: its capacity is not known", name))
			continue
		}
		reads, writes := policy.DiskResources(name)
		all[reads], all[writes] = half.ReadIOPS, half.WriteIOPS
	}
	return all, errors.Join(errs...)
}

// reprofile updates the real time of containers with io.realtime: auto after a new profile. If a
// container cannot have the new amount, it keeps the old one until the next Apply, which reports why.
func (f *BlockIO) reprofile() error {
	var errs []error
	for _, m := range f.managed {
		if m.kept > 0 && m.target.Settings.RealtimeAuto {
			errs = append(errs, f.grant(m))
		}
	}
	errs = append(errs, f.realtime())
	f.promote()
	return errors.Join(errs...)
}

// reserveKey is the policy key of reservations.
const reserveKey = "fairlead.io.reserve"

// Command implements feature.Commander. It sets the capacity of a disk, waits for events, and
// returns the api.SetRequest by which the agent changes a reservation.
func (f *BlockIO) Command(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if f.Verdict.Level == probe.Unavailable {
		return nil, f.Unavailable()
	}
	switch in := ask.Body.(type) {
	case api.ReservationChange:
		return f.change(of, in)
	case api.CapacityRequest:
		return f.setCapacity(in)
	case api.BlockIOEventsAfter:
		events, err := f.events.wait(ctx, uint64(in))
		return f.named(events), err
	}
	return nil, fmt.Errorf("blockio: no command %T", ask.Body)
}

// setCapacity records the capacity of a disk.
func (f *BlockIO) setCapacity(in api.CapacityRequest) (any, error) {
	d, err := block.Open(f.cfg.Roots.Sys, in.Device)
	if err != nil {
		return nil, refused(http.StatusBadRequest, "bad_request", "%s", err)
	}
	c := decide.Capacity{
		BlockIOFigures: in.BlockIOFigures, Headroom: cmp.Or(in.Headroom, decide.UsualHeadroom), Measured: in.Measured, Realtime: decide.NewProfile(in.Realtime),
		Depth1: in.Depth1, Depth: in.Depth, Seconds: in.Seconds, Recorded: time.Now().Truncate(time.Second),
	}
	if err := c.Check(); err != nil {
		return nil, refused(http.StatusBadRequest, "bad_request", "capacity of %s: %s", in.Device, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.capacity(d)
	c.Seen = was.Seen
	if len(c.Realtime) == 0 {
		c.Realtime = was.Realtime
	}
	if err := f.capacities.set(d.Identity(), c); err != nil {
		return nil, refused(http.StatusServiceUnavailable, "unavailable", "the capacity of %s cannot be kept, and is as it was: %s (--disk-capacities of the agent names the file)", in.Device, err)
	}
	if err := f.reprofile(); err != nil {
		f.cfg.Log.Error("real-time budgets are not all as the new profile says", "device", in.Device, "err", err)
	}
	return f.device(d), nil
}

// change returns the policy keys to set for a change of a reservation.
func (f *BlockIO) change(of *container.Container, in api.ReservationChange) (any, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.managed[of.ID]
	if m == nil {
		return nil, refused(http.StatusConflict, "refused", "container %s is not known yet", of.ID)
	}
	if !in.Delete && in.Figures == (api.BlockIOFigures{}) {
		return nil, refused(http.StatusBadRequest, "bad_request", "nothing is to be reserved: give operations or bytes per second")
	}
	ios := slices.Clone(m.target.Settings.IO)
	i := slices.IndexFunc(m.reserved, func(r reservation) bool { return reservationID(of.ID, r) == in.ID })
	device := in.Device
	switch {
	case in.ID == "":
		d, err := block.Open(f.cfg.Roots.Sys, in.Device)
		if err != nil {
			return nil, refused(http.StatusBadRequest, "bad_request", "%s", err)
		}
		for _, r := range m.reserved {
			switch {
			case r.disk.Number() != d.Number():
			case in.Replace:
				ios = slices.DeleteFunc(ios, func(io policy.IO) bool { return io.Device == r.device }) // policy may have used another name of the disk
			default:
				return nil, refused(http.StatusConflict, "refused", "container %s has a reservation of %s already: %s", of.ID, d.Name, reservationID(of.ID, r))
			}
		}
	case i < 0:
		return nil, refused(http.StatusNotFound, "not_found", "there is no reservation %q", in.ID)
	default:
		device = m.reserved[i].device
	}
	from := origin(m.target, reserveKey)
	if in.Delete && !strings.HasPrefix(from.From, "set by ") {
		return nil, refused(http.StatusConflict, "refused", "reservation %s comes from policy (%s) and ends there", in.ID, from.From)
	}
	ios = slices.DeleteFunc(ios, func(io policy.IO) bool { return io.Device == device })
	if !in.Delete {
		ios = append(ios, policy.IO{Device: device, Reserved: policy.Figures(in.Figures)})
	}
	set := api.SetRequest{Was: map[string]string{reserveKey: from.Value}}
	if value := policy.FormatReserve(ios); value != "" {
		set.Set = map[string]string{reserveKey: value}
	} else {
		set.Unset = []string{reserveKey}
	}
	return set, nil
}

// origin returns the origin of a key's value.
func origin(t policy.Target, key string) policy.Origin {
	i := slices.IndexFunc(t.Origins, func(o policy.Origin) bool { return o.Key == key })
	if i < 0 {
		return policy.Origin{}
	}
	return t.Origins[i]
}
