package isolate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// uplinkShares is the weight of the uplink cgroup without early drop, where it would be usualShares with
// it. By arithmetic a flood then takes at most a tenth of a core from others. With early drop packets
// that a container has no time for cost next to nothing, so others need no such protection.
const uplinkShares = 100

// uplinks holds the changes on the host while a container is isolated.
type uplinks struct {
	at      place
	devices map[container.Device]*uplinkDevice
}

// uplinkDevice is a device by which packets enter the host.
type uplinkDevice struct {
	name     string
	path     string // of its namespace
	threads  []thread
	at       place    // of its threads, unless a container owns their queue
	queues   []*queue // queues that a container may own; see queue.go
	deferred deferred // delay between its polls; see defer.go
}

// claimUplinks makes threads in the uplink cgroup poll the devices that packets for c pass.
func (is *Isolator) claimUplinks(ctx context.Context, c container.Container) error {
	host, err := is.cfg.Uplinks.Host()
	if err != nil {
		return err
	}
	var left []journal.Outcome
	if is.host == nil {
		at := is.uplinkPlace(host)
		if err := is.turn(making(at.group, is.cfg.Layout), is.owns(0)); err != nil {
			return err
		}
		is.host = &uplinks{at: at, devices: make(map[container.Device]*uplinkDevice)}
		if err := is.promptPolls(); err != nil { // delays that a killed agent has left
			return err
		}
		// A killed agent may have moved a thread to a container that has ended since. The thread
		// keeps the container's cgroup from being removed.
		for _, e := range is.cfg.Journal.Entries() {
			if e.Owner == is.by(0) && e.Ref.Kind == sched.KindKthread && e.Wrote != at.group {
				left = append(left, journal.Outcome{Entry: e})
			}
		}
	}
	err = is.cfg.Uplinks.Each(ctx, c, func(u uplink.Uplink) error {
		if is.host.devices[u.Key] != nil {
			return nil
		}
		return is.claim(u)
	})
	return errors.Join(err, kernel.Tidy(is.cfg.Roots, left))
}

// unclaim forgets the threads and the queues of a device that has gone.
func (is *Isolator) unclaim(key container.Device) error {
	err := is.forgetQueuesOf(is.host.devices[key])
	delete(is.host.devices, key)
	return err
}

// claim makes threads poll one uplink. renew repeats it, which drops the entries of threads that have
// ended.
func (is *Isolator) claim(u uplink.Uplink) error {
	dev := &uplinkDevice{name: u.Link.Name, path: u.Path, at: is.host.at}
	if is.resting.rests { // renew claims it after the rest
		is.host.devices[u.Key] = dev
		return nil
	}
	d, err := is.lookAt(u.NS, u.Link.Index, u.Link.Name)
	if err != nil {
		return err
	}
	if dev.at.cpus, err = d.steered(); err != nil {
		return err
	}
	as := is.owns(0)
	if dev.threads, err = is.bring(d, d.polling(single), dev.at, as); err != nil {
		return err
	}
	if was := is.host.devices[u.Key]; was != nil {
		err = is.restore(func(e journal.Entry) bool { return !as.turned[e.Ref] && slices.ContainsFunc(was.threads, turnedOf(e)) })
	}
	is.host.devices[u.Key] = dev
	if is.cfg.Drop != nil {
		queues, counted := is.countQueues(u.NS, u.Link.Index, dev.threads)
		dev.queues, err = queues, errors.Join(err, counted)
	}
	return err
}

// turnedOf returns a function that reports whether an entry belongs to a thread.
func turnedOf(e journal.Entry) func(thread) bool {
	return func(t thread) bool {
		return strings.HasPrefix(e.Ref.Object+":", fmt.Sprintf("%d:%d:", t.TID, t.Start))
	}
}

// weighUplinks gives the uplink cgroup the weight of its heaviest sibling that contains an isolated
// tenant, such as kubepods, and at least the default weight. Where all CPUs compute, the uplinks'
// threads then get as much time as that sibling.
func (is *Isolator) weighUplinks() error {
	knob, takes := cgroup.WeightKnob(is.host.at.group, is.v2())
	most, beside := takes.Usual, make(map[string]bool)
	for _, s := range is.isolated {
		dir, err := s.payer.TenantGroup()
		if err != nil {
			continue
		}
		below, err := filepath.Rel(is.cfg.Layout.CPU, dir)
		if err != nil {
			return err
		}
		first, _, _ := strings.Cut(below, "/")
		beside[filepath.Join(is.cfg.Layout.CPU, first)] = true
	}
	for dir := range beside {
		weight, err := is.weightOf(dir)
		if err != nil {
			return err
		}
		most = max(most, weight)
	}
	if is.cfg.Drop == nil {
		most = most * uplinkShares / usualShares
	}
	return is.turn([]journal.Setting{{Knob: knob, Value: strconv.FormatUint(most, 10)}}, is.owns(0))
}

// uplinkPlace returns the place of the uplinks' threads. Its cpuset has all CPUs.
func (is *Isolator) uplinkPlace(netns uint64) place {
	return place{group: kernel.UplinkGroup(is.cfg.Layout, netns), cpuset: is.cfg.Layout.CPUSet}
}

// forgetQueues stops to count the packets of the uplinks' queues.
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
		errs = append(errs, is.cfg.Drop.ForgetQueue(q.napi))
	}
	u.queues = nil
	return errors.Join(errs...)
}
