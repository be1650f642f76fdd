package account

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Errors of Open and Watch.
var (
	ErrRealtime = errors.New("softirqs of a PREEMPT_RT kernel can be preempted, and their time not told apart")
	ErrIdentity = errors.New("packets have no identity here, for the reason that the agent has logged")
	ErrSlots    = errors.New("as many containers are accounted for as there is room for")
)

// Config is what Open needs.
type Config struct {
	Proc   string // the root of proc; "" is /proc
	Cgroup string // the directory above all cgroup hierarchies; "" is the usual one

	// Identity learns of the tenants. Without one, Open fails with ErrIdentity.
	Identity *identity.Identity
	// Ends attaches the programs that stamp each packet with its sender's slot, on
	// behalf of Owner. If nil, packets are not stamped: packets that a queue of the
	// host delays are charged by their socket, or to System.
	Ends  *hook.Ends
	Owner journal.Owner

	// Count returns what the kernel counts at the devices of a network namespace, by index. With it
	// the programs are attached for windows only, unless something needs more (see Demand), and the
	// work in between is estimated. If nil, they are always attached.
	Count func(netns uint64) (map[int]netdev.Counters, error)

	byHand bool  // for tests: nothing begins and ends windows
	exact  uint8 // for tests that count every packet: never sample, and let packets wait so many seconds in a queue
}

// Meter keeps the accounts. It is safe for concurrent use.
type Meter struct {
	cfg      Config
	object   *bpf.Object
	maps     accountMaps
	flush    *ebpf.Program
	vars     vars
	programs []*ebpf.Program // in the order of attaching
	links    bpf.Links       // of programs that are always attached
	windows  *windows        // nil without Config.Count
	stamping bool

	mu       sync.Mutex
	accounts map[container.ID]*account
	cgroups  *identity.Cgroups // fl_containers
	last     int               // nth of the last account
	slots    []*account        // by slot; nil: free; 0 is the system's
	gone     time.Duration
	closed   bool

	pairs map[accountTheft]growth        // the content of fl_thefts
	idle  map[accountTheft]time.Duration // earlier values of idle pairs

	timed       bool      // the programs see interrupts
	calibrated  time.Time // the start of the last calibration
	calibrating sync.WaitGroup

	loop feature.Loop // of sample and the calibrations
}

// account is the account of one container: a slot in the per-CPU tables. It is not an
// identity.Slot. Several containers may share a tenant and its identity.Slot, but each
// container has an account of its own. There are 64 times as many identity.Slots. And
// those become free after a time, while an account's slot becomes free when a reading
// shows that no CPU holds charges for it.
type account struct {
	member identity.Member
	nth    int // in the order in which they were first watched
	slot   uint32
	number uint16 // in the stamps of its packets
	state  accountState

	stamps hook.Set // fl_stamp
	sockets
}

// teller names the Meter to Identity.
const teller = "accounts"

// accountState is the life of a slot. The next Read reports a forgotten account once
// more. The Read after that frees its slot, because no CPU can hold charges for it by
// then.
type accountState int

const (
	watched accountState = iota
	forgotten
	reported
)

// Open loads and attaches the programs. Until Watch they charge all packets to System. The error
// names the kernel's gap; it matches ErrRealtime on a PREEMPT_RT kernel, and ErrIdentity without an
// Identity.
func Open(cfg Config) (_ *Meter, err error) {
	if cfg.Proc == "" {
		cfg.Proc = "/proc"
	}
	m := &Meter{
		cfg:      cfg,
		accounts: make(map[container.ID]*account),
		idle:     make(map[accountTheft]time.Duration),
		loop:     feature.Loop{Name: "windows"},
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
		return nil, ErrIdentity
	}
	if m.object, err = bpf.Open("account", loadAccount, bpf.Vars{accountVarFlExact: cfg.exact}, m.cfg.Identity.Maps()); err != nil {
		return nil, err
	}
	var objs struct {
		accountMaps
		vars
		Flush *ebpf.Program `ebpf:"fl_flush"`
	}
	if err := m.object.Load(&objs, nil); err != nil {
		return nil, err
	}
	m.maps, m.flush, m.vars = objs.accountMaps, objs.Flush, objs.vars
	m.slots = make([]*account, 1, m.maps.FlAccounts.MaxEntries())
	m.cgroups = m.cfg.Identity.Cgroups(m.maps.FlContainers, "accounts of cgroups")
	// In this order, so that the programs see the end of every run that they saw start.
	if m.programs, err = m.object.Programs(accountProgFlExit, accountProgFlPolled, accountProgFlReceive, accountProgFlXmit, accountProgFlEnter); err != nil {
		return nil, err
	}
	if m.links, err = bpf.Attach(m.programs...); err != nil { // for windows, a trial
		return nil, err
	}
	if err := m.interrupts(); err != nil {
		return nil, err
	}
	if cfg.Ends != nil {
		p, err := m.stampOf(&account{}) // a trial: does the kernel accept it?
		if err != nil {
			return nil, err
		}
		if err := p.Close(); err != nil {
			return nil, err
		}
	}
	m.stamping = cfg.Count == nil
	if cfg.Count == nil {
		return m, nil
	}
	err = m.links.Close()
	m.links = nil
	if err != nil {
		return nil, err
	}
	m.windows = &windows{at: time.Now(), most: Seen, stop: make(chan struct{}), done: make(chan struct{})}
	if cfg.byHand {
		close(m.windows.done)
		return m, nil
	}
	err = m.turn(steady)
	go m.sample()
	if err != nil {
		return nil, err
	}
	return m, nil
}

// The places in Meter.programs of those that begin and end the run of a softirq.
const (
	exits  = 0
	enters = 4
)

// vars are the programs' variables.
type vars struct {
	Around     *ebpf.Variable `ebpf:"fl_around"`
	AroundCall *ebpf.Variable `ebpf:"fl_around_call"`
	Window     *ebpf.Variable `ebpf:"fl_window"`
	Bare       *ebpf.Variable `ebpf:"fl_bare"`
	Own        *ebpf.Variable `ebpf:"fl_own"`
}

// interrupts attaches the programs that charge timer and function call interrupts,
// where the kernel has tracepoints for them (x86).
func (m *Meter) interrupts() error {
	programs, err := m.object.Programs(accountProgFlTimed, accountProgFlTimer, accountProgFlCalled, accountProgFlCall)
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, btf.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	m.programs = append(m.programs, programs...)
	links, err := bpf.Attach(programs...)
	if err != nil {
		return err
	}
	m.links = append(m.links, links...)
	m.timed, m.calibrated = true, time.Now()
	return m.calibrate()
}

// stampOf returns a copy of the program that stamps packets with the number of an account.
func (m *Meter) stampOf(acc *account) (*bpf.Copy, error) {
	return m.object.Copy(accountProgFlStamp, bpf.Vars{accountVarFlNumber: acc.number})
}

// Loop returns the loop of the Meter's goroutines.
func (m *Meter) Loop() *feature.Loop { return &m.loop }

// Maps returns how full the maps are.
func (m *Meter) Maps() []bpf.Usage { return m.object.Usage() }

// Charges is a map from slot to a signed time in ns: the time that the container's packets
// took from others, minus the time that the packets of others took from its tasks. The
// scheduler has charged the container that much too little since Watch. Other programs may
// only read it. It belongs to the Meter.
func (m *Meter) Charges() *ebpf.Map { return m.maps.FlCharges }

// Taker loads the program that an XDP program tail-calls to drop a packet, after it has reported
// the tenant (bpf/fate.h). Taker's program charges the cost of the packet to the tenant's account
// and returns XDP_DROP. The program that calls it must accept packets of several fragments
// (BPF_F_XDP_HAS_FRAGS), as the kernel requires the same of both. The caller closes the program.
func (m *Meter) Taker() (*ebpf.Program, error) {
	return m.object.Program(accountProgFlTaken, nil)
}

// Slot returns a container's key in Charges, from Watch until Forget.
func (m *Meter) Slot(id container.ID) (uint32, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	acc := m.accounts[id]
	if acc == nil || acc.state != watched {
		return 0, false
	}
	return acc.slot, true
}

// Holder returns the container that is charged for the packets of a network namespace,
// which several containers may share: see identity.Member. ok is false if there is none.
func (m *Meter) Holder(netns uint64) (id container.ID, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	acc := m.holder(identity.Tenant{NetNS: netns})
	if acc == nil {
		return 0, false
	}
	return acc.member.ID, true
}

// holder returns the account that a tenant's packets are charged to, nil for
// System: of the containers that share it the one with the highest Rank, and among equals
// the first.
func (m *Meter) holder(of identity.Tenant) *account {
	return m.holders()[of]
}

// holders returns the holder of each tenant.
func (m *Meter) holders() map[identity.Tenant]*account {
	all := make(map[identity.Tenant]*account)
	for _, acc := range m.accounts {
		of := acc.member.Tenant
		if acc.state == watched && of != (identity.Tenant{}) && acc.precedes(all[of]) {
			all[of] = acc
		}
	}
	return all
}

// precedes reports whether acc holds a tenant's packets rather than another account of the tenant;
// nil: there is none.
func (acc *account) precedes(other *account) bool {
	return other == nil || cmp.Or(cmp.Compare(other.member.Rank, acc.member.Rank), cmp.Compare(acc.nth, other.nth)) < 0
}

// charge charges the packets of a tenant with a slot to its holder.
func (m *Meter) charge(of identity.Tenant, slot identity.Slot) error {
	if slot == identity.Nobody {
		return nil
	}
	account := uint32(0)
	if acc := m.holder(of); acc != nil {
		account = acc.slot
	}
	var was uint32
	if err := m.maps.FlPayers.Lookup(uint32(slot), &was); err != nil || was == account {
		return err
	}
	return errors.Join(m.maps.FlPayers.Put(uint32(slot), account), m.cfg.Identity.Changed())
}

// Watch starts to charge a container, or replaces what an earlier Watch said about it.
// The error matches ErrSlots if no slot is free. After any other error, for example about
// a device that has gone, the rest is in force.
func (m *Meter) Watch(told identity.Member) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	acc := m.accounts[told.ID]
	if acc == nil {
		slot, err := m.free()
		if errors.Is(err, ErrSlots) {
			slot, err = m.reclaim()
		}
		if err != nil {
			return fmt.Errorf("account for container %v: %w", told.ID, err)
		}
		acc = &account{slot: slot, number: m.draw()}
		if m.windows != nil {
			m.windows.soon(time.Now())
		}
		m.slots[slot] = acc
		m.accounts[told.ID] = acc
	}
	if acc.nth == 0 {
		m.last++
		acc.nth = m.last
	}
	was := acc.member
	acc.member, acc.state = told, watched
	if err := m.tell(was, told); err != nil {
		return fmt.Errorf("account for container %v: %w", told.ID, err)
	}
	return nil
}

// tell updates the programs after a change of one container from was. A container that is not
// watched any more is forgotten.
func (m *Meter) tell(was, now identity.Member) error {
	before := m.cfg.Identity.Lookup(was.Tenant)
	after := identity.Nobody
	var errs []error
	if acc := m.accounts[now.ID]; acc.state == watched {
		var err error
		after, err = m.cfg.Identity.Tell(teller, now)
		errs = append(errs, m.cgroups.Tell(now, uint16(acc.slot)), err)
	} else {
		errs = append(errs, m.cgroups.Forget(now.ID), m.cfg.Identity.Forget(teller, now.ID))
	}
	errs = append(errs, m.charge(was.Tenant, before), m.charge(now.Tenant, after))
	return errors.Join(append(errs, m.reattach([]identity.Member{was, now}))...)
}

// Room is how many containers can be accounted for at a time.
func (m *Meter) Room() int { return cap(m.slots) - 1 }

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

// draw draws a number that no account's stamps have. Those of other agents on this kernel are not
// known: fl_stamps.
func (m *Meter) draw() uint16 {
	for {
		n := uint16(1 + rand.IntN(math.MaxUint16))
		if !slices.ContainsFunc(m.slots, func(a *account) bool { return a != nil && a.number == n }) {
			return n
		}
	}
}

// reclaim recycles the slots of forgotten accounts and finds one. Recycling takes two
// Reads, and there may be a host where nothing reads the accounts.
func (m *Meter) reclaim() (uint32, error) {
	for range 2 {
		if _, err := m.read(false, true); err != nil {
			return 0, err
		}
	}
	return m.free()
}

// Forget ends the charging of a container. The next Reading contains its numbers once
// more, unless another container needs its slot before. After that they are part of Gone.
// Forget succeeds for a container that is not watched, and after Close.
func (m *Meter) Forget(id container.ID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	acc := m.accounts[id]
	if acc == nil || acc.state != watched || m.closed {
		return nil
	}
	was := acc.member
	acc.state, acc.nth = forgotten, 0
	acc.member = identity.Member{ID: id}
	if m.windows != nil {
		delete(m.windows.recent, id) // its work does not go on
	}
	if err := m.tell(was, acc.member); err != nil {
		return fmt.Errorf("end account of container %v: %w", id, err)
	}
	return nil
}

// Close detaches the programs and ends all accounting.
func (m *Meter) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	m.mu.Unlock()
	if m.windows != nil {
		close(m.windows.stop)
		<-m.windows.done
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calibrating.Wait()
	var errs []error
	for _, acc := range m.accounts {
		id := acc.member.ID
		acc.member = identity.Member{}
		errs = append(errs, m.attach(acc, false), m.cfg.Identity.Forget(teller, id))
	}
	if m.windows != nil {
		errs = append(errs, m.windows.others.Close(), m.windows.ends.Close())
	}
	errs = append(errs, m.links.Close())
	for _, p := range m.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(append(errs, m.flush.Close(), m.object.Close())...)
}
