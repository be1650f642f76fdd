package account

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/datapath/ends"
	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Errors of Open and Watch.
var (
	ErrRealtime = errors.New("softirqs of a PREEMPT_RT kernel can be preempted, and their time not told apart")
	ErrSlots    = errors.New("as many containers are accounted for as there is room for")
)

// Config is what Open needs.
type Config struct {
	Proc   string // the root of proc; "" is /proc
	Cgroup string // above all hierarchies; "" is where they are on any host

	// Identity is told of the tenants. nil: one of the Meter's own.
	Identity *identity.Identity
	// Ends are where packets are stamped with the slot of who sent them, on
	// behalf of Owner. nil: none are stamped, so that packets which a queue of
	// the host delays are charged by socket, or to nobody.
	Ends  *ends.Ends
	Owner journal.Owner

	exact bool // no sampling: what it is held against
}

// Meter keeps the accounts. Its methods may be called from several goroutines.
type Meter struct {
	cfg        Config
	object     *bpf.Object
	maps       accountMaps
	flush      *ebpf.Program
	around     *ebpf.Variable // fl_around
	aroundCall *ebpf.Variable // fl_around_call
	links      bpf.Links
	own        *identity.Identity // nil unless it is the Meter's own

	mu      sync.Mutex
	tenants map[container.ID]*tenant
	slots   []*tenant // by slot; nil: free; 0 is the system's
	gone    time.Duration
	closed  bool

	timed       bool      // interrupts are seen
	calibrated  time.Time // when it was last begun to measure what is around them
	calibrating sync.WaitGroup
}

// tenant is one account: a place in the per-CPU tables, of which there are few. Its
// slot is no identity.Slot: those are for network tenants, of which several containers
// may be one, while each container has an account of its own; there are 64 times as
// many of them as places here; and they are free again after a time, not once a reading
// has shown that no CPU holds charges any more.
type tenant struct {
	told  identity.Member
	slot  uint32
	state tenantState

	stamps ends.Set  // fl_stamp
	socket link.Link // where nothing else tells some of its packets
}

// teller is by whom identity is told.
const teller = "accounts"

// tenantState is the life of a slot. A forgotten tenant is reported once more;
// its slot is used again only a Read later, when no CPU can still hold charges
// for it.
type tenantState int

const (
	watched tenantState = iota
	forgotten
	reported
)

// Open loads and attaches the programs. The accounts are empty then, and all
// is the system's until Watch. The error says what the kernel lacks; it matches
// ErrRealtime on a PREEMPT_RT kernel.
func Open(cfg Config) (_ *Meter, err error) {
	if cfg.Proc == "" {
		cfg.Proc = "/proc"
	}
	m := &Meter{
		cfg:     cfg,
		tenants: make(map[container.ID]*tenant),
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("account: %w", err), m.Close())
		}
	}()
	version, err := os.ReadFile(filepath.Join(cfg.Proc, "version"))
	if err != nil {
		return nil, err
	}
	if strings.Contains(string(version), "PREEMPT_RT") {
		return nil, ErrRealtime
	}
	if cfg.Identity == nil {
		if m.own, err = identity.Open(cfg.Proc); err != nil {
			return nil, err
		}
		m.cfg.Identity = m.own
	}
	if m.object, err = bpf.Open("account", loadAccount, bpf.Vars{accountVarFlExact: cfg.exact}, m.cfg.Identity.Maps()); err != nil {
		return nil, err
	}
	var objs struct {
		accountMaps
		Around *ebpf.Variable `ebpf:"fl_around"`
		Call   *ebpf.Variable `ebpf:"fl_around_call"`
		Flush  *ebpf.Program  `ebpf:"fl_flush"`
	}
	if err := m.object.Load(&objs, nil); err != nil {
		return nil, err
	}
	m.maps, m.flush, m.around, m.aroundCall = objs.accountMaps, objs.Flush, objs.Around, objs.Call
	m.slots = make([]*tenant, 1, m.maps.FlAccounts.MaxEntries())
	// In this order, so that no CPU is in a run whose end is not seen.
	if m.links, err = m.object.Attach(accountProgFlExit, accountProgFlPolled, accountProgFlReceive, accountProgFlXmit, accountProgFlEnter); err != nil {
		return nil, err
	}
	if err := m.interrupts(); err != nil {
		return nil, err
	}
	if cfg.Ends == nil {
		return m, nil
	}
	p, err := m.load("fl_stamp", 0) // whether the kernel takes it
	if err != nil {
		return nil, err
	}
	return m, p.Close()
}

// interrupts attaches what counts the interrupts of timers and other CPUs' calls
// in, where there are events of them: those of x86.
func (m *Meter) interrupts() error {
	links, err := m.object.Attach(accountProgFlTimed, accountProgFlTimer, accountProgFlCalled, accountProgFlCall)
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, btf.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	m.links = append(m.links, links...)
	m.timed, m.calibrated = true, time.Now()
	return m.calibrate()
}

// load loads one more program. slot is what fl_stamp writes.
func (m *Meter) load(name string, slot uint32) (*ebpf.Program, error) {
	return m.object.Program(name, bpf.Vars{accountVarFlSlot: slot})
}

// Maps says how full the maps are.
func (m *Meter) Maps() []bpf.Usage { return m.object.Usage() }

// Charges is a map of slot to the time, in ns and signed, that the tenant's
// packets took from others less what others' packets took from its tasks: what
// the scheduler has charged it too little since Watch. Programs may add to
// nothing in it. It belongs to the Meter.
func (m *Meter) Charges() *ebpf.Map { return m.maps.FlCharges }

// Dropped is a map of one place for each CPU. A program that ends a packet before
// any device tells whose it is writes the tenant's Slot there, and what the packet
// has cost is charged to it. It belongs to the Meter.
func (m *Meter) Dropped() *ebpf.Map { return m.maps.FlDropped }

// Taker loads what a program calls by bpf_tail_call that drops a packet by XDP on a
// tenant's account, after it has written the tenant's Slot into Dropped: what the
// packet has cost is charged then, and it ends as XDP_DROP. frags says whether the
// caller takes packets of several fragments (BPF_F_XDP_HAS_FRAGS), as the kernel
// has both be alike. The program is the caller's to close.
func (m *Meter) Taker(frags bool) (*ebpf.Program, error) {
	return m.object.Program(accountProgFlTaken, bpf.Vars{accountVarFlFrags: frags}, bpf.Frags(frags))
}

// Slot is a tenant's place in Charges, from Watch until Forget.
func (m *Meter) Slot(id container.ID) (uint32, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.tenants[id]
	if t == nil || t.state != watched {
		return 0, false
	}
	return t.slot, true
}

// Holder is whose the packets of a network namespace are, of several tenants
// that are in it: see identity.Member. ok is false if they are nobody's.
func (m *Meter) Holder(netns uint64) (id container.ID, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.slots[m.cfg.Identity.AccountAt(netns, 0)] // that of 0 is nil
	if t == nil {
		return 0, false
	}
	return t.told.ID, true
}

// Watch begins to charge a container, or tells what has changed about it. What
// was said of it before is replaced; its Account is the Meter's to say. The error matches ErrSlots if there is no
// room; any other is of a part, a device that has gone say, and the rest is in
// force.
func (m *Meter) Watch(told identity.Member) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.tenants[told.ID]
	if t == nil {
		slot, err := m.free()
		if errors.Is(err, ErrSlots) {
			slot, err = m.reclaim()
		}
		if err != nil {
			return fmt.Errorf("account for container %v: %w", told.ID, err)
		}
		t = &tenant{slot: slot}
		m.slots[slot] = t
		m.tenants[told.ID] = t
	}
	was := t.told
	told.Account = uint16(t.slot)
	t.told, t.state = told, watched
	_, err := m.cfg.Identity.Tell(teller, told)
	if err := errors.Join(err, m.attachAll(was, told)); err != nil {
		return fmt.Errorf("account for container %v: %w", told.ID, err)
	}
	return nil
}

// free finds a slot.
func (m *Meter) free() (uint32, error) {
	for i := 1; i < len(m.slots); i++ {
		if m.slots[i] == nil {
			return uint32(i), nil
		}
	}
	if len(m.slots) == cap(m.slots) {
		return 0, ErrSlots
	}
	m.slots = append(m.slots, nil)
	return uint32(len(m.slots) - 1), nil
}

// reclaim is free once the slots of forgotten tenants are recycled, which two
// Reads do: on a host where nobody looks at the accounts there are none.
func (m *Meter) reclaim() (uint32, error) {
	for range 2 {
		if _, err := m.read(false); err != nil {
			return 0, err
		}
	}
	return m.free()
}

// Forget ends the charging of a container. Its numbers are in the next Reading
// once more, unless its slot is needed before, and then in Gone alone. One that is not watched is a success.
func (m *Meter) Forget(id container.ID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.tenants[id]
	if t == nil || t.state != watched {
		return nil
	}
	was := t.told
	t.state = forgotten
	t.told = identity.Member{ID: id}
	if err := errors.Join(m.cfg.Identity.Forget(teller, id), m.attachAll(was, t.told)); err != nil {
		return fmt.Errorf("end account of container %v: %w", id, err)
	}
	return nil
}

// Close ends all accounting.
func (m *Meter) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	m.calibrating.Wait()
	var errs []error
	for _, t := range m.tenants {
		id := t.told.ID
		t.told = identity.Member{}
		errs = append(errs, m.attach(t), m.cfg.Identity.Forget(teller, id))
	}
	return errors.Join(append(errs, m.links.Close(), m.flush.Close(), m.object.Close(), m.own.Close())...)
}
