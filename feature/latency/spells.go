package latency

import (
	"errors"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/tenant/identity"
)

// To say for what a packet waited, and when its application sent it, all of the host is
// watched: each system call and each switch of tasks takes longer meanwhile. An operator has
// that for as long as he asks. Containers that ask themselves have it for a spell in each
// span, and all of them together for so many spells.
const (
	spell      = 10 * time.Second
	span       = time.Minute
	mostSpells = 2
	mostSelf   = 16 // tenants that are recorded at their own request, at the same time
)

// spells has when each tenant's last spell began.
type spells map[identity.Tenant]time.Time

// settle begins spells for tenants that ask, if they may have one: who had none for the
// longest time comes first.
func (s spells) settle(asking []identity.Tenant, now time.Time) {
	recent := 0
	for t, began := range s {
		switch past := now.Sub(began); {
		case past < span:
			recent++
		case past > 10*span:
			delete(s, t)
		}
	}
	asking = slices.DeleteFunc(slices.Clone(asking), func(t identity.Tenant) bool { return now.Sub(s[t]) < span })
	slices.SortFunc(asking, func(a, b identity.Tenant) int { return s[a].Compare(s[b]) })
	for _, t := range asking[:min(len(asking), max(mostSpells-recent, 0))] {
		s[t] = now
	}
}

// on says whether a tenant has its spell.
func (s spells) on(t identity.Tenant, now time.Time) bool { return now.Sub(s[t]) < spell }

// watches says whether the host is to be watched. f.mu is held.
func (f *Latency) watches(now time.Time) bool {
	for _, t := range f.tenants {
		if t.traced && (t.asked.After(now) || t.askedSelf.After(now) && f.spells.on(t.key, now)) {
			return true
		}
	}
	return false
}

// settle gives spells to those who ask, and has the host watched or not. changed is set if
// what is recorded is not what it was. f.mu is held.
func (f *Latency) settle(now time.Time, changed bool) error {
	var asking []identity.Tenant
	for _, t := range f.tenants {
		if t.traced && t.askedSelf.After(now) {
			asking = append(asking, t.key)
		}
	}
	f.spells.settle(asking, now)
	if f.meter == nil {
		return nil
	}
	watch := f.watches(now)
	if watch == (f.meter.ran != nil) && !changed {
		return nil
	}
	var err error
	if watch {
		err = f.meter.resume()
	}
	return errors.Join(err, f.follow())
}
