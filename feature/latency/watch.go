package latency

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/tenant"
)

// Waits need programs at every task switch and every softirq of the host, which slow these down. The
// host is watched as long as an operator asks. A
// container that asks on its own socket has it watched for one spell in each span. mostSpells
// limits the spells of all such containers in a span.
const (
	spell      = 10 * time.Second
	span       = time.Minute
	mostSpells = 2
	mostSelf   = 16 // tenants recorded at their own request at a time
)

// spells holds the beginning of each tenant's last spell.
type spells map[tenant.Key]time.Time

// assign begins spells for tenants that ask, as far as the limits permit. The tenant that has
// waited longest comes first.
func (s spells) assign(asking []tenant.Key, now time.Time) {
	recent := 0
	for t, began := range s {
		switch past := now.Sub(began); {
		case past < span:
			recent++
		case past > 10*span:
			delete(s, t)
		}
	}
	asking = slices.DeleteFunc(slices.Clone(asking), func(t tenant.Key) bool { return now.Sub(s[t]) < span })
	slices.SortFunc(asking, func(a, b tenant.Key) int { return s[a].Compare(s[b]) })
	for _, t := range asking[:min(len(asking), max(mostSpells-recent, 0))] {
		s[t] = now
	}
}

// on reports whether a tenant's spell is running.
func (s spells) on(t tenant.Key, now time.Time) bool { return now.Sub(s[t]) < spell }

// watches reports whether the host should be watched. f.mu is held.
func (f *Latency) watches(now time.Time) bool {
	for key, m := range f.measured {
		if m.traced && (m.asked.After(now) || m.askedSelf.After(now) && f.spells.on(key, now)) {
			return true
		}
	}
	return false
}

// schedule assigns spells, and begins or ends watching the host. changed forces an update of the
// meter: other tenants are traced than before. f.mu is held.
func (f *Latency) schedule(now time.Time, changed bool) error {
	var asking []tenant.Key
	for key, m := range f.measured {
		if m.traced && m.askedSelf.After(now) {
			asking = append(asking, key)
		}
	}
	f.spells.assign(asking, now)
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

// watch attaches or detaches the programs that watch the host: the work of its CPUs.
func (m *meter) watch(on bool) (err error) {
	switch {
	case on && m.ran == nil:
		if err = m.maps.RanSince.Set(bpf.Clock()); err == nil {
			m.ran, err = m.object.Attach(latencyProgFlRanSwitch, latencyProgFlRanEntry, latencyProgFlRanExit, latencyProgFlRanRecv, latencyProgFlRanXmit)
		}
	case !on && m.ran != nil:
		err = errors.Join(m.ran.Close(), m.maps.RanSince.Set(uint64(0)))
		m.ran = nil
	}
	if err != nil {
		return fmt.Errorf("watch CPUs: %w", err)
	}
	return nil
}
