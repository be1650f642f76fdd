package blockio

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// reserveKey is the key that reserves.
const reserveKey = "fairlead.io.reserve"

// Command implements feature.Commander. It sets the capacity of a disk, waits for events, and
// returns the api.SetRequest by which the agent changes a reservation.
func (f *BlockIO) Command(ctx context.Context, of *container.Container, ask api.Ask) (any, error) {
	if f.support.Level == probe.Unavailable {
		return nil, refused(http.StatusServiceUnavailable, "unavailable", "blockio: %s", f.support.Why)
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

// setCapacity notes what a disk can do.
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
	for _, o := range t.Origins {
		if o.Key == key {
			return o
		}
	}
	return policy.Origin{}
}
