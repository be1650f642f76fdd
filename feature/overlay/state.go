package overlay

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/overlay/network"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/tenant"
)

// nameOf returns the name of a network on this host.
func (f *Overlay) nameOf(n network.Network) string {
	if f.host != nil && n.NetNS == f.host.Inode() {
		return n.Name
	}
	return fmt.Sprintf("%s@%d", n.Name, n.NetNS)
}

// state returns nil if all of a tenant's packets on overlay networks may be fast. Otherwise the error
// lists the networks on which they may not be, and why. It returns nil for a tenant on no network.
func (f *Overlay) state(t *tenant.Tenant) error {
	var partly []error
	for _, e := range t.Ends() {
		if e.Host && !e.Trusted && e.NetNS != f.host.Inode() { // so it was not searched for networks
			partly = append(partly, fmt.Errorf("%s: its host end is in a network namespace that is mounted nowhere where the agent sees it, so a container may have made it: "+
				"run the agent in the mount namespace of the container engine", e.Inside.Name))
		}
	}
	for _, n := range f.nets {
		for _, e := range t.Ends() {
			if !e.Host || !slices.Contains(n.Ends, e.Device) {
				continue
			}
			if err := f.stateAt(n, e); err != nil {
				partly = append(partly, fmt.Errorf("network %s: %w", f.nameOf(n), err))
				break
			}
		}
	}
	if len(partly) == 0 {
		return nil
	}
	return fmt.Errorf("overlay: %w: %w", feature.ErrPartly, errors.Join(partly...))
}

func (f *Overlay) stateAt(n network.Network, e container.End) error {
	o := f.force[keyOf(n)]
	switch state, _, why := f.condition(n, o); {
	case state != api.OverlayOn:
		return cmp.Or(f.broken[keyOf(n)], errors.New(why))
	case len(n.Uplinks) == 0:
		return errors.New("it has no uplink yet: no other node is known")
	}
	w, there := o.ways[e.Device]
	switch {
	case !there:
		return fmt.Errorf("%s was not there when it was looked at: if it is, it is looked at again within %v", e.Name, lookEvery)
	case w.In == network.Slow && !w.Out:
		return errors.New(w.WhyIn.Text)
	case w.In == network.Slow:
		return fmt.Errorf("what the container receives: %s", w.WhyIn.Text)
	case !w.Out:
		return fmt.Errorf("what the container sends: %s", w.WhyOut.Text)
	}
	return nil
}

// states returns what Apply would return for each container that asks for the fast path.
func (f *Overlay) states() map[container.ID]string {
	list := make(map[container.ID]string)
	for _, t := range f.tenants.Tenants() {
		if !tenant.Agree(t.Members(), wants).Value {
			continue
		}
		text := ""
		if err := f.state(t); err != nil {
			text = err.Error()
		}
		for _, m := range t.Members() {
			if on, _ := wants(m); on {
				list[m.Container.ID] = text
			}
		}
	}
	return list
}

// mostKilled limits the file, in bytes.
const mostKilled = 1 << 20

// killedFile is the content of the file Config.Killed.
type killedFile struct {
	Networks map[string]string `json:"networks"`
}

// stateFile keeps the networks stopped by hand until the next boot, which ends their namespaces.
func (f *Overlay) stateFile() kernel.StateFile {
	return kernel.StateFile{Path: f.cfg.Killed, Most: mostKilled, Proc: f.cfg.Roots.Proc}
}

// kill stops the fast path of a network by hand, or allows it again.
func (f *Overlay) kill(name string, kill bool, by string) error {
	was := maps.Clone(f.killed)
	if kill {
		f.killed[name] = by
	} else {
		delete(f.killed, name)
	}
	if err := f.stateFile().Write(killedFile{f.killed}); err != nil {
		f.killed = was
		return err
	}
	for _, o := range f.force {
		if f.nameOf(o.Network) == name {
			f.raise(o, "kill switch")
			if err := f.write(o, f.flags(o)); err != nil {
				return err
			}
		}
	}
	for id := range f.states() {
		f.changed(id)
	}
	return nil
}
