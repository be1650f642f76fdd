package isolate

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/uplink"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Plan returns what Isolate would write for a container, and writes nothing. A thread that does not
// exist yet has the name of its device in place of its number. It leaves out queues of uplinks,
// which traffic decides about later.
func (is *Isolator) Plan(ctx context.Context, c container.Container) (steps []feature.Step, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("plan netcpu isolate: %w", err)
		}
	}()
	ns, err := is.open(c)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	s := cmp.Or(is.isolated[c.TenantKey()], &isolation{})
	at, err := is.threadPlace(s, c)
	if err != nil {
		return nil, err
	}
	for _, dev := range c.Interfaces {
		if !dev.HasHostEnd() {
			continue
		}
		d, err := is.lookAtVeth(ns, dev)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", dev.Name, err)
		}
		of, err := is.planned(d, s.control.shape, at)
		d.end.close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", dev.Name, err)
		}
		steps = append(steps, of...)
	}
	if !is.cfg.Throttled {
		plan, _, err := is.weighing(c)
		if err != nil {
			return nil, err
		}
		if steps, err = appendSteps(steps, plan); err != nil {
			return nil, err
		}
	}
	host, err := is.cfg.Uplinks.Host()
	if err != nil {
		return nil, err
	}
	group := is.uplinkPlace(host)
	err = is.cfg.Uplinks.Each(ctx, c, func(u uplink.Uplink) error {
		d, err := is.lookAt(u.NS, u.Link.Index, u.Link.Name)
		if err != nil {
			return err
		}
		of, err := is.planned(d, single, group)
		steps = append(steps, of...)
		return err
	})
	return steps, err
}

// planned returns what bring would write for a device.
func (is *Isolator) planned(d device, s shape, at place) (steps []feature.Step, err error) {
	threaded := d.ns.Threaded(d.index)
	if steps, err = appendSteps(nil, append(d.polling(s), journal.Setting{Knob: threaded, Value: "1"})); err != nil {
		return nil, err
	}
	list, err := d.ns.NAPIs(d.index)
	if err != nil && !errors.Is(err, netdev.ErrNoNAPIList) {
		return nil, err
	}
	found := false
	for _, napi := range list {
		if napi.Thread == 0 {
			continue
		}
		t, err := sched.Find(is.cfg.Roots.Proc, napi.Thread)
		if err != nil {
			return nil, err
		}
		found = true
		plan, err := is.planFor(t, at)
		if err != nil {
			return nil, err
		}
		if steps, err = appendSteps(steps, plan); err != nil {
			return nil, err
		}
	}
	if !found {
		if at.child {
			if steps, err = appendSteps(steps, making(at.group, is.cfg.Layout)); err != nil {
				return nil, err
			}
		}
		steps = append(steps, feature.Step{Ref: journal.Ref{Kind: sched.KindKthread, Object: "napi/" + d.name}, Value: at.group})
	}
	return steps, nil
}

// appendSteps appends a plan with the present values.
func appendSteps(to []feature.Step, plan []journal.Setting) ([]feature.Step, error) {
	for _, s := range plan {
		now, err := s.Knob.Read()
		if errors.Is(err, journal.ErrGone) && s.Knob.Ref().Kind == cgroup.KindFile {
			now, err = "0", nil // a group to be made is not frozen
		}
		if err != nil {
			return to, err
		}
		to = append(to, feature.Step{Ref: s.Knob.Ref(), Now: now, Value: s.Value})
	}
	return to, nil
}
