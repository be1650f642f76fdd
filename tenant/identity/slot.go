package identity

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// Slot is the number of a network tenant (the CNid of CNTC, section 3.1). It fits into the
// minor of a qdisc class, and so into skb->priority. All features use the same slots.
type Slot uint16

// Nobody is the slot of the host itself and of containers without one. An unmarked packet
// carries it, since the kernel clears the field.
const Nobody Slot = 0

// Max is the highest slot. The four numbers above it are classes of the shaper
// (kernel/qdisc), one of which is never there.
const Max Slot = 0xfffb

// Quarantine is how long a released slot stays unused, so that late packets of a tenant
// that has ended are not taken for another's. Packets wait in a host's queues for a few
// seconds at worst.
const Quarantine = 30 * time.Second

// ErrFull is returned by Take, wrapped, when every slot is taken or in quarantine.
var ErrFull = errors.New("every slot for network tenants is taken")

// Tenant identifies a tenant.
type Tenant = container.TenantKey

// Allocator allocates slots: the lowest free one, as the paper's manager does, except
// during its Quarantine. It is safe for concurrent use.
type Allocator struct {
	mu      sync.Mutex
	now     func() time.Time
	taken   map[Tenant]*use
	next    Slot     // lowest never allocated
	free    []Slot   // below next and free, in order
	resting []rested // in quarantine, the oldest first
}

type use struct {
	slot  Slot
	users int
}

type rested struct {
	slot  Slot
	until time.Time
}

// NewAllocator returns an empty Allocator. now is the clock.
func NewAllocator(now func() time.Time) *Allocator {
	return &Allocator{now: now, taken: make(map[Tenant]*use), next: 1}
}

// Take returns the tenant's slot and takes a reference; Release drops one. The slot is
// the tenant's until the last reference is dropped. Errors: ErrFull.
func (a *Allocator) Take(t Tenant) (Slot, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if u := a.taken[t]; u != nil {
		u.users++
		return u.slot, nil
	}
	s, err := a.lowest()
	if err != nil {
		return Nobody, err
	}
	a.taken[t] = &use{slot: s, users: 1}
	return s, nil
}

// Release drops a reference of Take. It ignores a tenant without a slot.
func (a *Allocator) Release(t Tenant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	u := a.taken[t]
	if u == nil {
		return
	}
	if u.users--; u.users > 0 {
		return
	}
	delete(a.taken, t)
	a.resting = append(a.resting, rested{u.slot, a.now().Add(Quarantine)})
}

// Lookup returns the tenant's slot, or Nobody.
func (a *Allocator) Lookup(t Tenant) Slot {
	a.mu.Lock()
	defer a.mu.Unlock()
	if u := a.taken[t]; u != nil {
		return u.slot
	}
	return Nobody
}

// lowest returns the lowest slot that may be allocated.
func (a *Allocator) lowest() (Slot, error) {
	now := a.now()
	over := 0
	for over < len(a.resting) && !now.Before(a.resting[over].until) {
		at, _ := slices.BinarySearch(a.free, a.resting[over].slot)
		a.free = slices.Insert(a.free, at, a.resting[over].slot)
		over++
	}
	a.resting = slices.Delete(a.resting, 0, over)
	if len(a.free) > 0 {
		lowest := a.free[0]
		a.free = slices.Delete(a.free, 0, 1)
		return lowest, nil
	}
	if a.next > Max {
		return Nobody, fmt.Errorf("%w: %d tenants, %d numbers in quarantine for %s after their tenant's end", ErrFull, len(a.taken), len(a.resting), Quarantine)
	}
	a.next++
	return a.next - 1, nil
}
