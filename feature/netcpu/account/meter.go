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
	errRealtime = errors.New("softirqs of a PREEMPT_RT kernel can be preempted, and their time not told apart")
	ErrIdentity = errors.New("packets have no identity here, for the reason that the agent has logged")
	ErrSlots    = errors.New("as many containers are accounted for as there is room for")
)

// Config configures Open.
type Config struct {
	Proc   string // the root of proc; "" is /proc
	Cgroup string // the directory above all cgroup hierarchies; "" is the usual one

	// Identity keeps the tenants. If it is nil, Open fails with ErrIdentity.
	Identity *identity.Identity
	// Ends attaches the programs that stamp each packet with its sender's number, on
	// behalf of Owner. If it is nil, packets have no stamps: packets that a queue of the
	// host delays are charged by their socket, or to System.
	Ends  *hook.Ends
	Owner journal.Owner

	// Count returns the kernel's counters of the devices in a network namespace, by index. With it the
	// programs are attached only in windows, unless Demand asks for more, and the work between windows
	// is estimated. If it is nil, the programs are always attached.
	Count func(netns uint64) (map[int]netdev.Counters, error)

	byHand bool  // for tests: the test begins and ends windows
	exact  uint8 // for tests that count every packet: never sample, and let packets wait so many seconds in a queue
}

// Meter keeps the accounts. It is safe for concurrent use.
type Meter struct {
	cfg      Config
	object   *bpf.Object
	maps     accountMaps
	flush    *ebpf.Program
	vars     vars
	programs []*ebpf.Program // in the order in which they are attached
	links    bpf.Links       // of programs that are always attached
	windows  *windows        // nil without Config.Count
	stamping bool

	mu       sync.Mutex
	accounts map[container.ID]*account
	cgroups  *identity.Cgroups // fl_containers
	last     int               // nth of the newest account
	slots    []*account        // by slot; nil: free; slot 0 is System's
	gone     time.Duration
	closed   bool

	pairs map[accountTheft]growth        // content of fl_thefts
	idle  map[accountTheft]time.Duration // earlier values of idle pairs

	timed       bool      // the programs see interrupts
	calibrated  time.Time // start of the last calibration
	calibrating sync.WaitGroup

	loop feature.Loop // of sample and the calibrations
}

// account is the account of one container: a slot in the per-CPU tables. It differs from
// an identity.Slot. Containers of a tenant share an identity.Slot, but each container has
// its own account. There are 64 times as many identity.Slots, and they become free after
// a time. An account's slot becomes free when a reading shows that no CPU holds charges
// for it.
type account struct {
	member identity.Member
	nth    int // position in the order in which accounts were first watched
	slot   uint32
	number uint16 // in the stamps of its packets
	state  accountState

	stamps hook.Set // fl_stamp
	sockets
}

// teller names the Meter to Identity.
const teller = "accounts"

// accountState is the state of a slot. The next Read reports a forgotten account once
// more. The Read after that frees the slot, because no CPU can hold charges for it any
// longer.
type accountState int

const (
	watched accountState = iota
	forgotten
	reported
)

// Open loads and attaches the programs. Until Watch they charge all packets to System. The error names
// the feature that the kernel lacks. It matches errRealtime on a PREEMPT_RT kernel, and ErrIdentity
// without an Identity.
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
		return nil, errRealtime
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
	// Attach fl_enter last, so that the programs see the end of every run whose start they see.
	if m.programs, err = m.object.Programs(accountProgFlExit, accountProgFlPolled, accountProgFlReceive, accountProgFlXmit, accountProgFlEnter); err != nil {
		return nil, err
	}
	if m.links, err = bpf.Attach(m.programs...); err != nil { // with windows only a trial
		return nil, err
	}
	if err := m.interrupts(); err != nil {
		return nil, err
	}
	if cfg.Ends != nil {
		p, err := m.stampOf(&account{}) // a trial: the kernel may reject the program
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

// Indexes in Meter.programs of the programs at the exit and entry of a softirq.
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

// Charges returns a map from slot to a signed time in ns: the time that the container's
// packets took from others, minus the time that others' packets took from its tasks. The
// scheduler has charged the container that much too little since Watch. The map belongs to
// the Meter. Other programs may only read it.
func (m *Meter) Charges() *ebpf.Map { return m.maps.FlCharges }

// Taker loads the program that an XDP program tail-calls to drop a packet, after it has reported
// the tenant (bpf/fate.h). Taker's program charges the cost of the packet to the tenant's account
// and returns XDP_DROP. The calling program must also accept packets of several fragments
// (BPF_F_XDP_HAS_FRAGS), because the kernel requires that both do. The caller closes the program.
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

// Holder returns the container that pays for the packets of a network namespace, which
// containers may share: see identity.Member. ok is false if no container pays.
func (m *Meter) Holder(netns uint64) (id container.ID, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	acc := m.holder(identity.Tenant{NetNS: netns})
	if acc == nil {
		return 0, false
	}
	return acc.member.ID, true
}

// holder returns the account that pays for a tenant's packets, or nil for System. It is
// the account of the member with the highest Rank; among equals, of the first.
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

// precedes reports whether acc pays for its tenant's packets before another account of the tenant,
// which may be nil.
func (acc *account) precedes(other *account) bool {
	return other == nil || cmp.Or(cmp.Compare(other.member.Rank, acc.member.Rank), cmp.Compare(acc.nth, other.nth)) < 0
}

// charge makes the programs charge a tenant's packets to its holder.
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

// Watch starts to charge a container, or replaces the Member of an earlier Watch. The
// error matches ErrSlots if no slot is free. After any other error, for example about a
// device that has gone, the rest is in force.
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

// tell updates the programs after a container has changed from was to now. It removes a container
// that is no longer watched.
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

// Room returns the highest number of containers with an account.
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

// draw draws a random number that no account of this Meter uses in stamps. Numbers of other agents on
// this kernel are unknown: see fl_stamps.
func (m *Meter) draw() uint16 {
	for {
		n := uint16(1 + rand.IntN(math.MaxUint16))
		if !slices.ContainsFunc(m.slots, func(a *account) bool { return a != nil && a.number == n }) {
			return n
		}
	}
}

// reclaim recycles the slots of forgotten accounts and returns one. Recycling takes two
// reads, which reclaim does itself because nothing else may read the accounts.
func (m *Meter) reclaim() (uint32, error) {
	for range 2 {
		if _, err := m.read(false, true); err != nil {
			return 0, err
		}
	}
	return m.free()
}

// Forget stops charging a container. The next Reading contains its account once more,
// unless another container needs its slot first. After that the account is part of Gone.
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
		delete(m.windows.recent, id) // no estimates for it any longer
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
