package identity

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// Slot is the number of a network tenant, by which its packets can be told apart: it
// fits into the minor of a qdisc's class, and so into skb->priority, and into a part of
// the mark (the CNid of CNTC, section 3.1). It means the same to all features.
type Slot uint16

// MarkShift gives how far a Slot is shifted to lie in the part of the mark that a
// mask names, which has to be 16 bits in a row; 0 for the mask 0, no part of it.
func MarkShift(mask uint32) (int, error) {
	shift := bits.TrailingZeros32(mask)
	if mask == 0 {
		return 0, nil
	}
	if mask>>shift != math.MaxUint16 {
		return 0, fmt.Errorf("%#x is not 16 bits in a row", mask)
	}
	return shift, nil
}

// Nobody is no tenant: what the host itself sends, and whoever has no slot. A
// packet that has not been numbered has it, since the kernel clears its fields.
const Nobody Slot = 0

// Max is the highest number that is given out. The two above it are the classes
// that a shaper needs for itself (feature/traffic: the root's and everybody's).
const Max Slot = 0xfffd

// Quarantine is for how long a number that was released is not given out
// again, so that late packets of a tenant that has gone are taken for nobody
// else's. A packet waits in the queues of a host for some seconds at the worst.
const Quarantine = 30 * time.Second

// ErrFull is returned by Take, wrapped, when every number is taken or in
// quarantine.
var ErrFull = errors.New("every slot for network tenants is taken")

// Tenant names who gets a number. Containers that share a network namespace
// are one tenant; those in the host's are told apart by their cgroup.
type Tenant struct {
	NetNS     uint64       // inode; 0 for a container in the host's namespace
	Container container.ID // 0 unless NetNS is
}

// TenantOf gives the tenant that a container belongs to. It is zero for a container
// whose network is not known (it has ended).
func TenantOf(c container.Container) Tenant {
	if c.HostNetwork {
		return Tenant{Container: c.ID}
	}
	return Tenant{NetNS: c.NetNS}
}

// Allocator gives out numbers: the lowest free one, as the paper's manager
// does, but not one that was released a moment ago. It is safe for concurrent
// use.
type Allocator struct {
	mu      sync.Mutex
	now     func() time.Time
	taken   map[Tenant]*use
	next    Slot     // the lowest that was never given out
	free    slots    // below next and free for use, the lowest on top
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

// NewAllocator makes one with nothing given out. now is the clock.
func NewAllocator(now func() time.Time) *Allocator {
	return &Allocator{now: now, taken: make(map[Tenant]*use), next: 1}
}

// Take gives the tenant's number. Each call is to be followed, some day, by a
// Release: the number is the tenant's until all that took it have released it.
// Errors: ErrFull.
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

// Release undoes one Take. A tenant that has no number is none of its business.
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

// Lookup gives the tenant's number, Nobody if it has none.
func (a *Allocator) Lookup(t Tenant) Slot {
	a.mu.Lock()
	defer a.mu.Unlock()
	if u := a.taken[t]; u != nil {
		return u.slot
	}
	return Nobody
}

// lowest gives the lowest number that may be given out.
func (a *Allocator) lowest() (Slot, error) {
	now := a.now()
	over := 0
	for over < len(a.resting) && !now.Before(a.resting[over].until) {
		heap.Push(&a.free, a.resting[over].slot)
		over++
	}
	a.resting = slices.Delete(a.resting, 0, over)
	if len(a.free) > 0 {
		return heap.Pop(&a.free).(Slot), nil
	}
	if a.next > Max {
		return Nobody, fmt.Errorf("%w: %d tenants, %d numbers in quarantine for %s after their tenant's end", ErrFull, len(a.taken), len(a.resting), Quarantine)
	}
	a.next++
	return a.next - 1, nil
}

// slots is a heap with the lowest on top.
type slots []Slot

func (s slots) Len() int           { return len(s) }
func (s slots) Less(i, j int) bool { return s[i] < s[j] }
func (s slots) Swap(i, j int)      { s[i], s[j] = s[j], s[i] }
func (s *slots) Push(x any)        { *s = append(*s, x.(Slot)) }
func (s *slots) Pop() any {
	old := *s
	x := old[len(old)-1]
	*s = old[:len(old)-1]
	return x
}
