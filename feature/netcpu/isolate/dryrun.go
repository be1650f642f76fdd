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
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Plan returns the settings that Isolate would write for a container. It writes nothing. A thread that
// does not exist yet is named by its device instead of its TID. Plan omits the owners of uplink
// queues, which depend on later traffic.
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
	dry := &Isolator{cfg: is.cfg, dry: &steps}
	for _, dev := range c.Interfaces {
		if !dev.HasHostEnd() {
			continue
		}
		if _, err := dry.bringVeth(ns, dev, s.control.shape, at, owned{}); err != nil {
			return nil, fmt.Errorf("%s: %w", dev.Name, err)
		}
	}
	if _, err := dry.Weigh(c); err != nil {
		return nil, err
	}
	host, err := is.cfg.Uplinks.Host()
	if err != nil {
		return nil, err
	}
	err = is.cfg.Uplinks.Each(ctx, c, func(u uplink.Uplink) error {
		d, err := dry.lookAt(u.NS, u.Link.Index, u.Link.Name)
		if err != nil {
			return err
		}
		_, err = dry.bring(d, d.polling(single), dry.uplinkPlace(host), owned{})
		return err
	})
	return steps, err
}

// note records a plan, with the present values, instead of carrying it out.
func (is *Isolator) note(plan []journal.Setting) error {
	for _, s := range plan {
		now, err := s.Knob.Read()
		if errors.Is(err, journal.ErrGone) && s.Knob.Ref().Kind == cgroup.KindFile {
			now, err = "0", nil // a new group is not frozen
		}
		if err != nil {
			return err
		}
		*is.dry = append(*is.dry, feature.Step{Ref: s.Knob.Ref(), Now: now, Value: s.Value})
	}
	return nil
}

// noteThreads records the place of threads that do not exist yet.
func (is *Isolator) noteThreads(device string, at place) error {
	if at.child {
		if err := is.note(making(at.group, is.cfg.Layout)); err != nil {
			return err
		}
	}
	*is.dry = append(*is.dry, feature.Step{Ref: journal.Ref{Kind: sched.KindKthread, Object: "napi/" + device}, Value: at.group})
	return nil
}
