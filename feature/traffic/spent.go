package traffic

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

// holdFor is how long a decision about a used-up volume counts unless it is renewed.
const holdFor = 5 * time.Minute

// Adopt implements feature.Decider: volumes that were used up stay so while an agent starts again.
func (f *Traffic) Adopt([]journal.Entry) (out []policy.Decision) {
	v := f.volumes
	if v == nil {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	now := v.now()
	for _, d := range v.decided {
		d.Expiry = now.Add(time.Minute) // until Decide
		out = append(out, d)
	}
	return out
}

// Decide implements feature.Decider: a container that has used up its volume gets the ceil that its
// policy has for that, unless it has a stricter one.
func (f *Traffic) Decide(targets []policy.Target, complete bool) ([]policy.Decision, error) {
	v := f.volumes
	if v == nil {
		return nil, nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.follow(targets)
	now := v.now()
	due := make(map[decided]policy.Decision)
	if len(v.limits) > 0 { // on most hosts there are none
		for _, members := range tenantsOf(targets) {
			for _, d := range v.decide(members, now) {
				due[decided{d.Container, d.Key}] = d
			}
		}
	}
	var out []policy.Decision
	changed := false
	for at, d := range due {
		was, before := v.decided[at]
		if before && was.Value == d.Value && was.Reason == d.Reason {
			d.Since = was.Since
		} else {
			changed = true
			v.log.Info("a volume is used up", "container", d.Container, "key", d.Key, "value", d.Value, "why", d.Reason)
		}
		due[at] = d
		out = append(out, d)
	}
	for at, d := range v.decided {
		if _, still := due[at]; !still && complete {
			changed = true
			d.Value, d.Expiry = "", time.Unix(1, 0) // one that has lapsed takes back what was decided
			out = append(out, d)
		} else if !still {
			due[at] = d
		}
	}
	v.decided = due
	slices.SortFunc(out, func(a, b policy.Decision) int {
		return cmp.Or(cmp.Compare(a.Container, b.Container), cmp.Compare(a.Key, b.Key))
	})
	if !changed {
		return out, nil
	}
	v.ledger.Hold(slices.Collect(maps.Values(due)))
	return out, v.ledger.Save()
}

// tenantsOf groups the targets that share a network.
func tenantsOf(targets []policy.Target) map[tenant.Key][]policy.Target {
	tenants := make(map[tenant.Key][]policy.Target)
	for _, t := range targets {
		if key := t.Container.TenantKey(); key.NetNS != 0 {
			tenants[key] = append(tenants[key], t)
		}
	}
	return tenants
}

// spent is a volume that is used up.
type spent struct {
	volume policy.Volume
	used   uint64
	until  time.Time
}

// spentBy returns the volume of a container if its account has used that up. v.mu is held.
func (v *volumes) spentBy(account string, of policy.Volume) (spent, bool) {
	if of.Bytes == 0 || account == "" {
		return spent{}, false
	}
	used := v.ledger.Used(account, of.Per).Of(of.Of)
	return spent{of, used, v.ledger.End(of.Per)}, used >= of.Bytes
}

// decide decides about containers that share a network. They have one ceil in each direction, the
// strictest of all members' volumes, because their packets cannot be told apart.
func (v *volumes) decide(members []policy.Target, now time.Time) (out []policy.Decision) {
	var containers []container.Container
	for _, t := range members {
		containers = append(containers, t.Container)
	}
	account := accountOf(containers)
	for _, way := range []struct {
		group string
		of    policy.Counted // the volumes without this direction do not count
		net   func(policy.Settings) policy.Net
	}{
		{"fairlead.net.", policy.OnlyReceived, func(s policy.Settings) policy.Net { return s.Egress }},
		{"fairlead.net.ingress.", policy.OnlySent, func(s policy.Settings) policy.Net { return s.Ingress }},
	} {
		var by spent
		for _, t := range members {
			s, is := v.spentBy(account, t.Settings.Volume)
			if is && s.volume.Of != way.of && s.volume.After > 0 && (by.volume.After == 0 || s.volume.After < by.volume.After) {
				by = s
			}
		}
		if by.volume.After == 0 {
			continue
		}
		d := policy.Decision{
			Value: policy.FormatRate(by.volume.After), Since: now, Expiry: now.Add(holdFor),
			Reason: fmt.Sprintf("its volume of %s is used up until %s", by.volume, by.until.Format("2006-01-02 15:04 MST")),
		}
		if by.until.Before(d.Expiry) {
			d.Expiry = by.until
		}
		for _, t := range members {
			n := way.net(t.Settings)
			if _, asks := dueOf(t); !asks && t.Settings.Volume.Bytes == 0 {
				continue // it has no say
			}
			d.Container = t.Container.ID
			if n.Ceil == 0 || n.Ceil > by.volume.After {
				d.Key = way.group + "ceil"
				out = append(out, d)
			}
			if n.Rate > by.volume.After { // a rate above the ceil is a contradiction
				d.Key = way.group + "rate"
				out = append(out, d)
			}
		}
	}
	return out
}
