package isolate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// uplinkGroup begins the name of the cgroup of the threads that poll devices
// which every container's packets come through. The host's network namespace
// follows: several agents may run on one machine, each in one of its own.
const uplinkGroup = "fairlead-uplink-"

// uplinkShares is the cpu.shares (v1) of that group where packets cannot be
// dropped early, against 1024 of an ordinary group: a flood then takes at most a
// tenth of a core from the others. With early drop the group has the usual
// weight, which nobody needs to be protected from, since what a container cannot
// take costs next to nothing. MEASURED.md, "The stage before the container", has
// what was measured; the weight without early drop is arithmetic.
const uplinkShares = 100

// uplinks is what is changed on the host while any container is isolated.
type uplinks struct {
	group   string
	devices map[uplink.Key]*uplinkDevice
}

// uplink is one device by which packets enter the host.
type uplinkDevice struct {
	name    string
	path    string // to its namespace
	threads []thread
	cpus    []int    // of its threads, where RPS had its packets; nil: all
	queues  []*queue // those that a container could be given; see queue.go
}

// claimUplinks moves the polling of the devices by which packets reach c into
// threads of the uplink group.
func (is *Isolator) claimUplinks(ctx context.Context, c container.Container) error {
	host, err := is.cfg.Uplinks.Host()
	if err != nil {
		return err
	}
	if is.host == nil {
		group, err := is.makeUplinkGroup(host)
		if err != nil {
			return err
		}
		is.host = &uplinks{group: group, devices: make(map[uplink.Key]*uplinkDevice)}
	}
	return is.claimSome(ctx, c, func(uplink.Key) bool { return true })
}

// claimSome claims those of c's uplinks that want names and that are not yet. is.host
// is there.
func (is *Isolator) claimSome(ctx context.Context, c container.Container, want func(uplink.Key) bool) error {
	return is.cfg.Uplinks.Each(ctx, c, func(ns *netdev.NS, path string, links []netdev.Link) error {
		for _, l := range links {
			key := uplink.Key{NetNS: ns.Inode(), Index: l.Index}
			if is.host.devices[key] != nil || !want(key) {
				continue
			}
			u, err := is.claim(ns, path, l)
			if u != nil {
				is.host.devices[key] = u
			}
			if err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, netdev.ErrNoLink) {
				return fmt.Errorf("uplink %s: %w", l.Name, err)
			}
		}
		return nil
	})
}

// unclaim forgets the threads and the queues of devices: they may be others by now.
func (is *Isolator) unclaim(keys ...uplink.Key) error {
	var errs []error
	for _, key := range keys {
		if is.host == nil || is.host.devices[key] == nil {
			continue
		}
		errs = append(errs, is.forgetQueuesOf(is.host.devices[key]))
		delete(is.host.devices, key)
	}
	return errors.Join(errs...)
}

// Reset places the threads of those of c's uplinks again whose drivers may have made
// others; see drop.Points.Open.
func (is *Isolator) Reset(ctx context.Context, c container.Container, keys []uplink.Key) error {
	claimed := make(map[uplink.Key]bool)
	for _, key := range keys {
		claimed[key] = is.host != nil && is.host.devices[key] != nil
	}
	if err := is.unclaim(keys...); err != nil || !slices.Contains(slices.Collect(maps.Values(claimed)), true) {
		return err
	}
	return is.claimSome(ctx, c, func(key uplink.Key) bool { return claimed[key] })
}

func (is *Isolator) claim(ns *netdev.NS, path string, l netdev.Link) (*uplinkDevice, error) {
	cpus, err := is.steered(ns, l.Index)
	if err != nil {
		return nil, err
	}
	if err := is.stopRPS(ns, l.Index, 0); err != nil {
		return nil, err
	}
	threads, err := is.threaded(ns, l.Index, l.Name, 0)
	if err != nil {
		return nil, err
	}
	u := &uplinkDevice{name: l.Name, path: path, cpus: cpus}
	for _, t := range threads {
		if err := errors.Join(is.moveUplink(t), is.steer(t, cpus), is.hasten(t, 0)); err != nil {
			return nil, err
		}
		u.threads = append(u.threads, thread{t, l.Name})
	}
	if is.cfg.Programs == nil {
		return u, nil
	}
	u.queues, err = is.countQueues(ns, l.Index, u.threads)
	return u, err
}

// moveUplink moves a thread of an uplink into the uplink group. An agent that
// was killed may have given it to a container that has ended since, whose cgroup
// then could not go.
func (is *Isolator) moveUplink(t sched.Thread) error {
	groups := map[string]string{is.cfg.Layout.CPU: is.host.group}
	if set := is.cfg.Layout.CPUSet; set != "" && set != is.cfg.Layout.CPU {
		groups[set] = set // all CPUs
	}
	for hierarchy, group := range groups {
		knob := sched.Group(is.cfg.Roots.Proc, is.cfg.Layout, t, hierarchy)
		was, err := knob.Read()
		if err != nil {
			return err
		}
		if was == group {
			continue
		}
		if err := is.turn(knob, group, 0); err != nil {
			return err
		}
		left := journal.Outcome{Entry: journal.Entry{Ref: knob.Ref(), Wrote: was}}
		if err := kernel.Tidy(is.cfg.Roots, []journal.Outcome{left}); err != nil {
			return err
		}
	}
	return nil
}

func (is *Isolator) makeUplinkGroup(netns uint64) (string, error) {
	dir := filepath.Join(is.cfg.Layout.CPU, uplinkGroup+strconv.FormatUint(netns, 10))
	if err := is.turn(cgroup.Group(dir), cgroup.Present, 0); err != nil {
		return "", err
	}
	if is.cfg.Programs != nil {
		return dir, nil
	}
	return dir, is.setWeight(dir, uplinkShares, 0)
}

// forgetQueues ends the counting of what the queues of the uplinks bring.
func (is *Isolator) forgetQueues() error {
	if is.host == nil {
		return nil
	}
	var errs []error
	for _, u := range is.host.devices {
		errs = append(errs, is.forgetQueuesOf(u))
	}
	return errors.Join(errs...)
}

func (is *Isolator) forgetQueuesOf(u *uplinkDevice) error {
	var errs []error
	for _, q := range u.queues {
		errs = append(errs, is.cfg.Programs.ForgetQueue(q.napi))
	}
	u.queues = nil
	return errors.Join(errs...)
}
