package traffic

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/policy"
)

// ways lists the devices that a tenant's packets pass.
type ways struct {
	veths  []string // host ends, which see all packets
	below  []string // which bypass all other devices of the host on the way to an uplink
	beside []string // whose packets no device of the host sees
}

// ways sorts the tenant's devices. A device made in the container's namespace on top of another one
// there leads nowhere by itself.
func (t *shaped) ways() (w ways) {
	if t.Key().NetNS == 0 {
		return ways{below: []string{"the host's network"}}
	}
	var inner []string
	for _, e := range t.Ends() {
		dev := e.Inside
		named := fmt.Sprintf("%s (%s)", dev.Name, dev.Kind)
		switch {
		case dev.HasHostEnd():
			w.veths = append(w.veths, e.Name)
		case dev.Kind == "veth": // see devices
		case unseen(dev.Kind):
			w.below = append(w.below, named)
		case dev.Kind == "device":
			w.beside = append(w.beside, dev.Name+" (hardware)")
		case dev.Apart || dev.Kind == "netkit":
			w.beside = append(w.beside, named)
		default:
			inner = append(inner, named)
		}
	}
	if len(w.veths)+len(w.below)+len(w.beside) == 0 {
		w.beside = inner
	}
	for _, list := range [][]string{w.veths, w.below, w.beside} {
		slices.Sort(list)
	}
	return w
}

// account is the part of a tenant's due that holds, and the part that does not.
type account struct {
	holds bool // any of it
	gaps  []error
}

func (a *account) gap(format string, args ...any) {
	a.gaps = append(a.gaps, fmt.Errorf(format, args...))
}

// beside adds what a program of others may keep from the queue of a hold.
func (a *account) beside(h *hold, keys string) {
	if h.before != "" {
		a.gap("%s: %s holds for what %sof somebody else passes on, which runs before (tcx); possible with: its owner's own limit", h.link.Name, keys, h.before)
	}
}

// unkept returns an error for the part of a tenant's due that does not hold: feature.ErrPartly if
// any part holds. missing lists uplinks that do not exist.
func (f *Traffic) unkept(t *shaped, missing []string) error {
	var a account
	w := t.ways()
	switch {
	case len(w.veths)+len(w.below)+len(w.beside) == 0:
		return errors.New("the container has no network device, so that there is nothing to hold; possible with: a network")
	case len(w.beside) > 0:
		a.gap("what passes %s comes to no device of the host at which it could be held; possible with: a bridge network or a macvlan", strings.Join(w.beside, ", "))
	}
	if len(w.veths)+len(w.below) > 0 {
		for _, way := range directions() {
			f.unkeptWay(&a, t, w, way, missing)
		}
	}
	if len(a.gaps) == 0 {
		return nil
	}
	if a.holds {
		return fmt.Errorf("%w: %w", feature.ErrPartly, errors.Join(a.gaps...))
	}
	return errors.Join(a.gaps...)
}

// wishes lists the keys that a policy sets.
func wishes(n policy.Net) (keys []string) {
	for _, k := range []struct {
		name string
		set  bool
	}{{"rate", n.Rate > 0}, {"ceil", n.Ceil > 0}, {"weight", n.Weight > 0}, {"priority", n.Priority != nil}, {"latency", n.Latency > 0}} {
		if k.set {
			keys = append(keys, k.name)
		}
	}
	return keys
}

// unkeptWay adds one direction.
func (f *Traffic) unkeptWay(a *account, t *shaped, w ways, way Direction, missing []string) {
	n, prefix := t.due[way], way.prefix()
	keys := wishes(n)
	if n.Ceil > 0 && len(w.veths) > 0 && !f.atUplinks(way) {
		t.unkeptCeil(a, way)
		if len(w.below) == 0 { // and need not hold anywhere else
			keys = slices.DeleteFunc(keys, func(k string) bool { return k == "ceil" })
		}
	}
	if len(keys) == 0 {
		return
	}
	for _, name := range missing {
		a.gap("there is no uplink %s", name)
	}
	if len(f.uplinks) == 0 && len(missing) == 0 {
		a.gap("%s %s not kept: the host has no uplink: no hardware is up (the agent's flag --uplink names others)", listed(prefix, keys), are(keys))
	}
	var holding []string
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		link := u.hold(way).link
		if err := u.unheld(way); err != nil {
			a.gap("uplink %s: %s %s not kept: %w", link.Name, listed(prefix, keys), are(keys), err)
			continue
		}
		holding = append(holding, link.Name)
		a.beside(u.hold(way), listed(prefix, keys))
		unkept := link.Unkept(keys)
		a.holds = a.holds || len(unkept) < len(keys)
		if len(unkept) > 0 {
			a.gap("uplink %s: %s %s not kept, as the rate of the link is not known: its driver does not tell ("+giveRate+")",
				link.Name, listed(prefix, unkept), are(unkept), link.Name)
		}
	}
	if slices.Contains(keys, "ceil") && len(holding) > 0 {
		f.aside(a, w, prefix+"ceil", holding)
	}
}

// holding lists the holds of a tenant's ceil of what it sends or receives.
func (t *shaped) holding(way Direction) (list []*hold) {
	for at, h := range t.holds {
		if at.way == way {
			list = append(list, h)
		}
	}
	slices.SortFunc(list, func(a, b *hold) int { return strings.Compare(a.link.Name, b.link.Name) })
	return list
}

// summed reports whether a hold of what the tenant receives is below one of the sum.
func (t *shaped) summed(h *hold) bool {
	for at, s := range t.holds {
		if at.sum && at.NetNS == h.of.NetNS && s.why == nil && !h.ifb() && slices.Contains(s.from, h.of.Index) {
			return true
		}
	}
	return false
}

// unkeptCeil adds a ceil at veths, of what the tenant sends or receives.
func (t *shaped) unkeptCeil(a *account, way Direction) {
	key := way.prefix() + "ceil"
	var holding []string
	for _, h := range t.holding(way) {
		if h.why != nil {
			a.gap("%s%s: %s is not kept: %w", h.link.Name, map[bool]string{true: " and others together"}[h.sum], key, h.why)
			continue
		}
		a.holds = true
		a.beside(h, key)
		if !t.summed(h) {
			holding = append(holding, h.link.Name)
		}
	}
	if len(holding) > 1 {
		a.gap("%s holds for each of %s, not for their sum; possible with: a single network, or a ceil divided by their number", key, strings.Join(holding, ", "))
	}
}

// aside adds a ceil that uplinks enforce, for want of a veth.
func (f *Traffic) aside(a *account, w ways, key string, holding []string) {
	where := "uplink " + holding[0]
	if len(holding) > 1 {
		where = fmt.Sprintf("each of the uplinks %s, not for their sum", strings.Join(holding, ", "))
	}
	switch {
	case len(w.below) > 0:
		a.gap("%s holds for what passes %s, and not for what stays on this host, as there is no veth for %s; possible with: a bridge network", key, where, strings.Join(w.below, ", "))
	case len(w.beside) == 0:
		a.gap("%s holds for what passes %s, and not for what stays on this host; possible with: Linux 6.6 or later", key, where)
	}
}

// listed formats policy keys.
func listed(prefix string, keys []string) string { return prefix + strings.Join(keys, ", "+prefix) }

func are(keys []string) string {
	if len(keys) > 1 {
		return "are"
	}
	return "is"
}

// Evidence implements feature.Witness: what holds a container's due: the uplinks, its own devices
// alone, or qdiscs of others that are as strict as its ceil.
func (f *Traffic) Evidence(id container.ID) (out []api.Evidence) {
	f.mu.Lock()
	defer f.mu.Unlock()
	say := func(format string, args ...any) {
		out = append(out, api.Evidence{Feature: name, Time: f.cfg.Now(), Text: fmt.Sprintf(format, args...)})
	}
	for _, t := range f.shaped {
		if !slices.Contains(t.IDs(), id) {
			continue
		}
		for _, way := range directions() {
			n, prefix := t.due[way], way.prefix()
			for _, h := range t.holding(way) {
				if h.theirs != "" {
					say("%sceil = %s is held by somebody else's %s, which is left in place", prefix, policy.FormatRate(n.Ceil), h.theirs)
				}
			}
			if f.needs(t, way) {
				say("%s: the uplinks have classes for it", listed(prefix, wishes(n)))
			} else if n.Ceil > 0 {
				say("%sceil: only the container's own devices were changed for it", prefix)
			}
		}
	}
	return out
}
