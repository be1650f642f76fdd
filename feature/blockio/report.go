package blockio

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// reserveKey is the key that reserves.
const reserveKey = "fairlead.io.reserve"

// Report implements feature.Reporter. A Body asks for something to be done: to a
// reservation, which the agent does with the api.SetRequest that is the answer, or to a
// capacity.
func (f *BlockIO) Report(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if f.support.Level == probe.Unavailable {
		return nil, refused(http.StatusServiceUnavailable, "unavailable", "blockio: %s", f.support.Why)
	}
	switch body := ask.Body.(type) {
	case api.ReservationChange:
		return f.change(of, body)
	case api.CapacityRequest:
		return f.setCapacity(body)
	case api.BlockIOEventsAfter:
		events, err := f.events.wait(ctx, uint64(body))
		return f.named(events), err
	}
	f.mu.Lock()
	d, length := f.shown, f.window.Length
	f.mu.Unlock()
	var before, after detail
	if ask.Over > 0 {
		before = f.detailOf(of)
		var err error
		if d, length, err = f.look(ctx, ask.Over); err != nil {
			return nil, err
		}
		after = f.detailOf(of)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.wire(d, length)
	after.addTo(&out, before, length)
	if of != nil {
		mine := func(id api.ID) bool { return id == api.ID(of.ID) }
		out.Rows = slices.DeleteFunc(out.Rows, func(r api.BlockIORow) bool { return !mine(r.Container) })
		out.Waits = slices.DeleteFunc(out.Waits, func(w api.BlockIOWait) bool { return !mine(w.Victim) })
		out.Events = slices.DeleteFunc(out.Events, func(e api.BlockIOEvent) bool { return !mine(e.Victim) && !mine(e.Culprit) })
		out.Realtime = slices.DeleteFunc(out.Realtime, func(r api.BlockIORealtime) bool { return !mine(r.Container) })
		out.Reservations = slices.DeleteFunc(out.Reservations, func(r api.Reservation) bool { return !mine(r.Container) })
	}
	return out, nil
}

// wire puts what happened in a time into the API's form. The caller holds f.mu.
func (f *BlockIO) wire(d reading, length time.Duration) api.BlockIO {
	out := api.BlockIO{
		Taken: d.Taken, Seconds: length.Seconds(), Rows: []api.BlockIORow{}, Waits: []api.BlockIOWait{}, Devices: []api.BlockIODevice{},
		Events: []api.BlockIOEvent{}, Reservations: []api.Reservation{}, Lost: d.Lost.Accounts + d.Lost.Waits + d.Lost.Pairs + d.Lost.Levels,
	}
	if out.Taken.IsZero() {
		out.Taken = time.Now()
	}
	if length > 0 {
		out.Stolen = d.stolen.Seconds() / length.Seconds()
	}
	accounts := make(map[decide.Place]monitor.Account)
	for _, a := range d.Accounts {
		if a.Reads+a.Writes+a.Errors > 0 {
			accounts[decide.Place{Container: a.Container, Disk: a.Disk}] = a
		}
	}
	disks := make(map[decide.Disk]bool)
	for id, m := range f.managed {
		for _, r := range m.reserved {
			at := decide.Place{Container: id, Disk: r.at()}
			out.Reservations = append(out.Reservations, f.reservation(m, r, achieved(accounts[at], length)))
			if _, had := accounts[at]; !had {
				accounts[at] = monitor.Account{Container: id, Disk: r.at()}
			}
		}
	}
	for id, act := range f.actions { // a cap may leave nothing to be seen in so short a time
		for disk := range act.Caps {
			at := decide.Place{Container: id, Disk: disk}
			if _, had := accounts[at]; !had {
				accounts[at] = monitor.Account{Container: id, Disk: disk}
			}
		}
	}
	for at, a := range accounts {
		disks[at.Disk] = true
		out.Rows = append(out.Rows, f.row(at, a, d, length))
	}
	for _, w := range d.Waits {
		if w.For <= 0 || length <= 0 {
			continue
		}
		wire := api.BlockIOWait{Victim: api.ID(w.Victim), Culprit: api.ID(w.Culprit), Name: f.name(w.Culprit), Share: w.For.Seconds() / length.Seconds()}
		if why, is := map[container.ID]string{
			decide.Unseen: "too many to tell", decide.Quota: "(CPU quota)", decide.Realtime: "(real-time budget)", decide.Stolen: "(hypervisor)",
		}[w.Culprit]; is {
			wire.Culprit, wire.Name = 0, why
		}
		out.Waits = append(out.Waits, wire)
	}
	for at := range f.awaited() {
		disks[at] = true
	}
	for at := range disks {
		if disk, err := block.Find(f.cfg.Roots.Sys, at.Major, at.Minor); err == nil {
			out.Devices = append(out.Devices, f.device(disk))
		}
	}
	out.Events = append(out.Events, f.named(f.events.after(0))...)
	out.Realtime = f.realtimes()
	api.SortBlockIO(out)
	return out
}

func (f *BlockIO) name(id container.ID) string {
	if id == decide.System {
		return "(host)"
	}
	c, _ := f.cfg.Containers.Lookup(id)
	return c.Name
}

// atLeast is the number of context switches in a second from which their ratio means
// something, as in the paper.
const atLeast = 50

func (f *BlockIO) row(at decide.Place, a monitor.Account, d reading, length time.Duration) api.BlockIORow {
	row := api.BlockIORow{
		Container: api.ID(at.Container), Disk: f.diskName(at.Disk), Achieved: achieved(a, length), Errors: a.Errors, State: decide.StateBestEffort,
	}
	if at.Container != decide.System {
		row.Name = f.name(at.Container)
	}
	if a.Queue != nil {
		row.QueueP50, row.QueueP99 = a.Queue.Quantile(0.5).Seconds(), a.Queue.Quantile(0.99).Seconds()
		row.DeviceP50, row.DeviceP99 = a.Device.Quantile(0.5).Seconds(), a.Device.Quantile(0.99).Seconds()
	}
	if m := f.managed[at.Container]; m != nil {
		for _, r := range m.reserved {
			if r.at() == at.Disk {
				s := f.standing(at.Container, r)
				reserved := r.figures
				row.Reserved, row.State, row.Since, row.Evidence, row.Mend = &reserved, s.State, s.Since, s.Evidence, s.Mend
				if s.State == decide.StateContended {
					row.Culprit, row.By = api.ID(s.Culprit), f.name(s.Culprit)
				}
			}
		}
	}
	if act, acts := f.actions[at.Container]; acts {
		row.Action = f.actionText(at.Container, act)
		if !act.None() || row.State == decide.StateBestEffort {
			row.Since, row.Evidence = act.Since, act.Reason
		}
	}
	if length > 0 {
		addContention(&row, at.Container, d, length)
	}
	return row
}

// addContention adds how a container competed for the CPUs, if that was watched.
func addContention(row *api.BlockIORow, id container.ID, d reading, length time.Duration) {
	part := func(t time.Duration) float64 { return t.Seconds() / length.Seconds() }
	for _, s := range d.Switches {
		if s.Container != id {
			continue
		}
		row.Voluntary, row.Involuntary, row.WaitP99 = s.Voluntary, s.Involuntary, s.Wait.Quantile(0.99).Seconds()
		if s.Voluntary > 0 && float64(s.Voluntary+s.Involuntary) >= atLeast*length.Seconds() {
			row.ICPU = float64(s.Involuntary) / float64(s.Voluntary)
			row.ICPUForeign = float64(s.Foreign) / float64(s.Voluntary)
			row.ICPUOwn = row.ICPU - row.ICPUForeign
		}
	}
	for _, w := range d.Waits {
		if w.Victim == id && w.Culprit != id && (w.Culprit == decide.System || decide.IsContainer(w.Culprit)) {
			row.WaitForeign += part(w.For)
		}
	}
	if t, watched := d.delays[id]; watched {
		row.CPUPressure, row.IOPressure = part(t.cpu), part(t.io)
		for _, quota := range t.throttled {
			row.Throttled += part(quota)
		}
	}
}

func (f *BlockIO) reservation(m *managed, r reservation, got api.BlockIOFigures) api.Reservation {
	id := m.target.Container.ID
	s := f.standing(id, r)
	out := api.Reservation{
		ID: reservationID(id, r), Container: api.ID(id), Name: m.target.Container.Name, Device: r.device, Reserved: r.figures, Achieved: got,
		State: s.State, Evidence: s.Evidence, Mend: s.Mend, From: origin(m.target).From,
	}
	if c := f.capacity(r.disk); c.Known() {
		out.Share, _, _ = c.Share(r.figures)
	}
	a := f.admission(r)
	out.Admission, out.Advice = a.How, a.Text
	return out
}

func reservationID(id container.ID, r reservation) string {
	return fmt.Sprintf("%s-%d-%d", id, r.disk.Major, r.disk.Minor)
}

// origin returns the origin of a container's reservations.
func origin(t policy.Target) policy.Origin {
	for _, o := range t.Origins {
		if o.Key == reserveKey {
			return o
		}
	}
	return policy.Origin{}
}

func (f *BlockIO) device(d block.Disk) api.BlockIODevice {
	c := f.capacity(d)
	out := api.BlockIODevice{
		Disk: d.Name, Number: d.Number(), Model: d.Model, Scheduler: d.Scheduler, Capacity: c.BlockIOFigures, Headroom: c.Headroom, Measured: c.Measured,
		Support: "caps", Realtime: c.Realtime,
		Depth1: c.Depth1, Seen: c.Seen, Basis: c.Basis(), Calibration: f.awaited()[decide.Disk{Major: d.Major, Minor: d.Minor}],
	}
	if by := f.divides(d); by != "" {
		out.Support = "weights by " + by + ", caps"
	}
	for _, h := range f.holders(decide.Disk{Major: d.Major, Minor: d.Minor}, 0) {
		if c.Known() {
			s, _, _ := c.Share(h.Figures)
			out.Reserved += s
		}
	}
	return out
}

// setCapacity notes what a disk can do.
func (f *BlockIO) setCapacity(in api.CapacityRequest) (any, error) {
	d, err := block.Open(f.cfg.Roots.Sys, in.Device)
	if err != nil {
		return nil, refused(http.StatusBadRequest, "bad_request", "%s", err)
	}
	c := decide.Capacity{
		BlockIOFigures: in.BlockIOFigures, Headroom: in.Headroom, Measured: in.Measured, Realtime: decide.NewProfile(in.Realtime),
		Depth1: in.Depth1, Depth: in.Depth, Seconds: in.Seconds, Recorded: time.Now().Truncate(time.Second),
	}
	if c.Headroom == 0 {
		c.Headroom = decide.UsualHeadroom
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

// change returns what has to be set for a change of a reservation.
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
				ios = slices.DeleteFunc(ios, func(io policy.IO) bool { return io.Device == r.device }) // it may have been written in another way
			default:
				return nil, refused(http.StatusConflict, "refused", "container %s has a reservation of %s already: %s", of.ID, d.Name, reservationID(of.ID, r))
			}
		}
	case i < 0:
		return nil, refused(http.StatusNotFound, "not_found", "there is no reservation %q", in.ID)
	default:
		device = m.reserved[i].device
	}
	from := origin(m.target)
	if in.Delete && !strings.HasPrefix(from.From, "set by ") {
		return nil, refused(http.StatusConflict, "refused", "reservation %s comes from policy (%s) and ends there", in.ID, from.From)
	}
	ios = slices.DeleteFunc(ios, func(io policy.IO) bool { return io.Device == device })
	if !in.Delete {
		ios = append(ios, policy.IO{
			Device: device, ReadIOPS: in.Figures.ReadIOPS, WriteIOPS: in.Figures.WriteIOPS, ReadBytes: in.Figures.ReadBytes, WriteBytes: in.Figures.WriteBytes,
		})
	}
	set := api.SetRequest{Was: map[string]string{reserveKey: from.Value}}
	if value := policy.FormatReserve(ios); value != "" {
		set.Set = map[string]string{reserveKey: value}
	} else {
		set.Unset = []string{reserveKey}
	}
	return set, nil
}
