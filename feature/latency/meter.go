package latency

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// Flags of a tenant in fl_tenants; maps.bpf.h.
const (
	tenantMeasured = 1 << iota
	tenantTraced
	tenantHost
)

// Numbers of the hooks; latency.bpf.c.
const (
	hookPoll = iota
	hookReceive
	hookQueue
	hookXmit
)

// begin and pass are bits of fl_near: a measurement may begin at a hook, or continue there.
func begin(hook int) uint16 { return 1 << hook }
func pass(hook int) uint16  { return 0x10 << hook }

// nearUplink is NEAR_UPLINK, another bit of fl_near.
const nearUplink uint16 = 0x100

// meter is the BPF object and its attached programs. One goroutine at a time may use it.
type meter struct {
	object   *bpf.Object
	programs struct {
		Xmit    *ebpf.Program `ebpf:"fl_xmit"`
		Receive *ebpf.Program `ebpf:"fl_receive"`
		Poll    *ebpf.Program `ebpf:"fl_poll"`
		Queue   *ebpf.Program `ebpf:"fl_queue"`
		Backlog *ebpf.Program `ebpf:"fl_backlog"`
	}
	links  bpf.Links // nil: detached for rest
	queued bpf.Links // of Backlog, while an uplink is a veth
	ran    bpf.Links // of waits.bpf.h, while the host is watched
	maps   struct {
		Tallies  *ebpf.Map      `ebpf:"fl_tallies"`
		CPUs     *ebpf.Map      `ebpf:"fl_cpus"`
		Records  *ebpf.Map      `ebpf:"fl_records"`
		Near     *ebpf.Variable `ebpf:"fl_near"`
		Uplinks  *ebpf.Variable `ebpf:"fl_uplinks"`
		Tenants  *ebpf.Variable `ebpf:"fl_tenants"`
		Unseen   *ebpf.Variable `ebpf:"fl_unseen"`
		Budget   *ebpf.Variable `ebpf:"fl_budget"`
		Attached *ebpf.Variable `ebpf:"fl_attached_at"`
		Passed   *ebpf.Variable `ebpf:"fl_passed_at"`
		Lost     *ebpf.Variable `ebpf:"fl_lost"`
		Waits    *ebpf.Variable `ebpf:"fl_lost_waits"`
		RanSince *ebpf.Variable `ebpf:"fl_ran_since"`
	}
	ends    *ends
	sockets map[string]*socket
	tallies map[identity.Slot]*ebpf.Map

	recorded bool // a tracer has read Records

	counted  time.Time      // last call of rate
	received map[int]uint32 // packets until then, by CPU
	look     time.Duration  // length of the last look of a cycle
	since    time.Time      // beginning of the current rest, if any
	rested   time.Duration  // in earlier rests
}

// socket is fl_socket at the cgroup of one container.
type socket struct {
	sockets
	program *bpf.Copy
	link    link.Link // nil: detached for rest
}

func (s *socket) close() error {
	var err error
	if s.link != nil {
		err = bpf.Unlink(s.link)
	}
	return errors.Join(err, s.program.Close())
}

// openMeter loads and attaches the programs. host is the inode of the host's network namespace,
// shared are the maps of package identity.
func openMeter(host uint64, shared bpf.Maps) (_ *meter, err error) {
	m := &meter{ends: new(ends), sockets: make(map[string]*socket), tallies: make(map[identity.Slot]*ebpf.Map)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("measure latency: %w", err), m.close())
		}
	}()
	if m.object, err = bpf.Open("latency", loadLatency, bpf.Vars{latencyVarFlHostNetns: uint32(host), latencyVarFlRows: uint32(mostStamps / rowOfStamps)}, shared); err != nil {
		return nil, err
	}
	if err := errors.Join(m.object.Load(&m.maps, nil), m.object.Load(&m.programs, nil)); err != nil {
		return nil, err
	}
	return m, m.resume()
}

// close detaches the programs and closes the object.
func (m *meter) close() error {
	if m == nil {
		return nil
	}
	errs := []error{m.links.Close(), m.queued.Close(), m.ran.Close()}
	for _, p := range []*ebpf.Program{m.programs.Xmit, m.programs.Receive, m.programs.Poll, m.programs.Queue, m.programs.Backlog} {
		errs = append(errs, p.Close())
	}
	for _, s := range m.sockets {
		errs = append(errs, s.close())
	}
	for _, inner := range m.tallies {
		errs = append(errs, inner.Close())
	}
	clear(m.sockets)
	clear(m.tallies)
	return errors.Join(append(errs, m.object.Close())...)
}

// add makes the tallies of a slot, all at 0.
func (m *meter) add(s identity.Slot) error {
	if m.tallies[s] != nil {
		return nil
	}
	inner, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "fl_tally", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(binary.Size(tally{})), MaxEntries: uint32(2 * protocols),
	})
	if err != nil {
		return fmt.Errorf("make histograms: %w", err)
	}
	if err := m.maps.Tallies.Put(uint32(s), inner); err != nil {
		return errors.Join(fmt.Errorf("make histograms: %w", err), inner.Close())
	}
	m.tallies[s] = inner
	return nil
}

// remove removes a slot's tallies. Its packets in flight are not counted.
func (m *meter) remove(s identity.Slot) error {
	inner := m.tallies[s]
	if inner == nil {
		return nil
	}
	delete(m.tallies, s)
	return errors.Join(m.maps.Tallies.Delete(uint32(s)), inner.Close())
}

// read returns the tallies of a slot, nil if it has none.
func (m *meter) read(s identity.Slot) (*tallies, error) {
	inner := m.tallies[s]
	if inner == nil {
		return nil, nil
	}
	var all tallies
	for d := range directions {
		for p := range protocols {
			if err := inner.Lookup(uint32(int(d)*int(protocols)+int(p)), &all[d][p]); err != nil {
				return nil, fmt.Errorf("read histograms: %w", err)
			}
		}
	}
	return &all, nil
}

// follow measures at exactly these ends. budget limits how many packets each CPU measures per
// second. follow continues after an error.
func (m *meter) follow(e *ends, budget uint32) error {
	m.ends = e
	const windows = 59 // of 2^24 ns, in a second
	return errors.Join(
		m.maps.Budget.Set(max(budget/windows, 1)),
		m.maps.Uplinks.Set(&e.uplinks.at), m.maps.Unseen.Set(e.unseen), m.maps.Tenants.Set(e.tenants[:]), m.maps.Near.Set(&e.near),
		m.queue(), m.listen())
}

// queue attaches or detaches the program at the backlog.
func (m *meter) queue() (err error) {
	want := m.ends.uplinks.queued && m.links != nil
	switch {
	case want && m.queued == nil:
		m.queued, err = bpf.Attach(m.programs.Backlog)
	case !want && m.queued != nil:
		err = m.queued.Close()
		m.queued = nil
	}
	return err
}

// listen attaches the programs at exactly the cgroups of the ends.
func (m *meter) listen() error {
	var errs []error
	for dir, s := range m.sockets {
		if m.ends.sockets[dir] != s.sockets {
			errs = append(errs, s.close())
			delete(m.sockets, dir)
		}
	}
	for dir, of := range m.ends.sockets {
		s := m.sockets[dir]
		if s == nil {
			p, err := m.object.Copy(latencyProgFlSocket, bpf.Vars{latencyVarFlSlot: uint32(of.slot), latencyVarFlWay: of.way})
			if err != nil {
				errs = append(errs, fmt.Errorf("measure sockets: %w", err))
				continue
			}
			s = &socket{sockets: of, program: p}
			m.sockets[dir] = s
		}
		if m.links == nil || s.link != nil {
			continue
		}
		err := s.attach(dir)
		if err != nil && !errors.Is(err, unix.ENOENT) { // the container has ended; the next round removes it
			errs = append(errs, fmt.Errorf("measure sockets: %w", err))
		}
	}
	return errors.Join(errs...)
}

// sockets describes the sockets in one cgroup: their tenant, and the way by which packets reach
// them (BY_ in latency.bpf.c).
type sockets struct {
	slot identity.Slot
	way  uint8
}

const (
	byDevice = iota
	byUplink
	byMacvlan
)

func (s *socket) attach(dir string) error {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Program: s.program.Program, Attach: ebpf.AttachCGroupInetIngress})
	if err == nil {
		s.link = l
	}
	return err
}

// passed returns the events that each CPU passed over, and the stamps evicted before their tenant
// was known, since the meter was opened.
func (m *meter) passed() (events []uint64, evicted uint64, err error) {
	var cpus []latencyCpu
	if err := m.maps.CPUs.Lookup(uint32(0), &cpus); err != nil {
		return nil, 0, fmt.Errorf("read counters: %w", err)
	}
	for _, c := range cpus {
		events = append(events, c.Passed)
		evicted += c.Evicted
	}
	return events, evicted, nil
}

// supported returns why this kernel cannot measure, or nil.
func supported() error {
	o, err := bpf.Open("latency", loadLatency, nil, nil)
	if err != nil {
		return err
	}
	p, err := o.Program(latencyProgFlPoll, nil)
	return errors.Join(err, p.Close(), o.Close())
}

// ends lists where the programs look at packets, in the form of maps.bpf.h.
type ends struct {
	near    [4096]uint16 // NEAR
	uplinks uplinks
	tenants [1 << 16]uint8
	unseen  uint32             // tenants without a device at which the programs see packets arrive
	sockets map[string]sockets // by cgroup directory
}

// ends finds the devices, uplinks and sockets of the measured tenants. Package identity maps them
// to tenants.
func (f *Latency) ends() (*ends, error) {
	e := &ends{sockets: make(map[string]sockets)}
	var err error
	if e.uplinks, err = f.findUplinks(); err != nil {
		return nil, err
	}
	f.uplinks = e.uplinks
	for _, t := range f.tenants.Tenants() {
		m := f.measured[t.Key()]
		if m == nil {
			continue // about to be measured
		}
		flags := uint8(tenantMeasured)
		if m.traced {
			flags |= tenantTraced
		}
		for _, member := range t.Members() {
			c, way := member.Container, uint8(byDevice)
			for _, dev := range c.Interfaces {
				e.watch(dev.Index, begin(hookQueue)|begin(hookReceive)|pass(hookReceive)|pass(hookXmit))
				e.watch(dev.Host.Index, begin(hookQueue)|pass(hookReceive)|pass(hookQueue)|pass(hookXmit))
				if dev.Kind == "macvlan" || dev.Kind == "ipvlan" {
					way = byMacvlan
				}
			}
			if c.HostNetwork {
				way, flags = byUplink, flags|tenantHost
			}
			if way != byDevice {
				e.unseen++
			}
			if c.Cgroup.V2 != "" {
				e.sockets[c.Cgroup.V2] = sockets{m.slot, way}
			}
		}
		e.tenants[m.slot] = flags
	}
	bits := begin(hookPoll) | begin(hookReceive) | pass(hookReceive) | pass(hookQueue) | pass(hookXmit) | nearUplink
	if e.unseen > 0 {
		bits |= begin(hookQueue)
	}
	for _, index := range e.uplinks.at {
		e.watch(int(index), bits)
	}
	return e, nil
}

// uplinks are the devices by which packets leave the host: those in Config, or all.
type uplinks struct {
	at     [64]uint32 // UPLINKS
	queued bool       // one is a veth, so its driver may not poll
}

func (f *Latency) findUplinks() (list uplinks, err error) {
	links, err := f.cfg.Roots.Monitor.Links(f.host, netdev.MostLinks)
	found := 0
	for _, l := range links {
		named := slices.Contains(f.cfg.Uplinks, l.Name)
		if (named || len(f.cfg.Uplinks) == 0 && l.Leaves(links)) && found < len(list.at) {
			list.at[found] = uint32(l.Index)
			list.queued = list.queued || l.Kind == "veth"
			found++
		}
	}
	return list, err
}

func (e *ends) watch(index int, bits uint16) {
	if index > 0 {
		e.near[index%len(e.near)] |= bits
	}
}
