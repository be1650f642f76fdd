package latency

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// What fl_devices says of a device, beside the slot; maps.bpf.h.
const (
	roleContainer = 0x10000
	roleHostEnd   = 0x20000
	roleUplink    = 0x30000
	roleMask      = 0x30000
	flagTraced    = 0x40000
	flagUnseen    = 0x80000 // of fl_cgroups
)

// The hooks as fl_near numbers them; latency.bpf.c.
const (
	hookPoll = iota
	hookReceive
	hookQueue
	hookXmit
)

// begin and pass are bits of fl_near: a packet may begin at a hook, or is looked
// at there if it has begun.
func begin(hook int) uint8 { return 1 << hook }
func pass(hook int) uint8  { return 0x10 << hook }

// subBits is HIST_SUB_BITS of maps.bpf.h, buckets is HIST_BUCKETS.
const (
	subBits = 3
	topBits = 34
	buckets = (topBits - subBits + 1) << subBits
)

// tally is struct tally of maps.bpf.h.
type tally struct {
	Seen, Matched, Local, Unsampled, Unmatched, Mismatched, Evicted, Reserved uint64

	Stage [stages]struct {
		Sum   uint64
		Count [buckets]uint64
	}
}

// histogram gives one stage's.
func (t *tally) histogram(s Stage) *hist.Histogram {
	h := &t.Stage[s]
	return &hist.Histogram{Sub: subBits, Counts: h.Count[:], Sum: h.Sum}
}

// meter is what is in the kernel while a container is measured. Its methods are
// called by one goroutine at a time.
type meter struct {
	object *bpf.Object
	links  bpf.Links
	queued bpf.Links // fl_backlog, while an uplink is a veth
	maps   struct {
		Tallies *ebpf.Map      `ebpf:"fl_tallies"`
		Devices *ebpf.Map      `ebpf:"fl_devices"`
		Cgroups *ebpf.Map      `ebpf:"fl_cgroups"`
		CPUs    *ebpf.Map      `ebpf:"fl_cpus"`
		Records *ebpf.Map      `ebpf:"fl_records"`
		Near    *ebpf.Variable `ebpf:"fl_near"`
		Hosts   *ebpf.Variable `ebpf:"fl_hosts"`
		Lost    *ebpf.Variable `ebpf:"fl_lost"`
	}
	devices map[latencyDevice]uint32
	cgroups map[uint64]uint32
	sockets map[string]link.Link // fl_socket, by cgroup directory
	tallies map[identity.Slot]*ebpf.Map
}

// openMeter loads and attaches the programs. budget is how many packets a second
// each CPU measures at the most; beyond, they are chosen by chance. host is the
// inode of the host's network namespace.
func openMeter(host uint64, budget uint32) (_ *meter, err error) {
	m := &meter{
		devices: make(map[latencyDevice]uint32), cgroups: make(map[uint64]uint32),
		sockets: make(map[string]link.Link), tallies: make(map[identity.Slot]*ebpf.Map),
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("measure latency: %w", err), m.close())
		}
	}()
	const windows = 59 // of 2^24 ns, in a second
	if m.object, err = bpf.Open("latency", loadLatency, bpf.Vars{latencyVarFlBudget: max(budget/windows, 1), latencyVarFlHostNetns: uint32(host)}, nil); err != nil {
		return nil, err
	}
	if err := m.object.Load(&m.maps, nil); err != nil {
		return nil, err
	}
	// From the ends of the way to its beginnings: no packet begins whose end is not seen.
	m.links, err = m.object.Attach(latencyProgFlXmit, latencyProgFlReceive, latencyProgFlPoll, latencyProgFlQueue)
	return m, err
}

// close takes everything out of the kernel.
func (m *meter) close() error {
	errs := []error{m.links.Close(), m.queued.Close()}
	for dir, l := range m.sockets {
		errs = append(errs, l.Close())
		delete(m.sockets, dir)
	}
	for s, inner := range m.tallies {
		errs = append(errs, inner.Close())
		delete(m.tallies, s)
	}
	return errors.Join(append(errs, m.object.Close())...)
}

// add makes the tallies of a slot, all at nothing.
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

// remove forgets a slot's tallies. Packets of it that are under way are counted
// nowhere.
func (m *meter) remove(s identity.Slot) error {
	inner := m.tallies[s]
	if inner == nil {
		return nil
	}
	delete(m.tallies, s)
	return errors.Join(m.maps.Tallies.Delete(uint32(s)), inner.Close())
}

// read gives the tallies of a slot, nil if it has none.
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

// tallies are all of one tenant.
type tallies [directions][protocols]tally

// follow makes the maps hold these devices and these cgroups of tenants in the
// host's namespace, and nothing else. An error is of some of them; the rest is done.
func (m *meter) follow(devices map[latencyDevice]uint32, cgroups map[uint64]uint32) error {
	err := errors.Join(
		bring(m.maps.Devices, m.devices, devices, "device"),
		bring(m.maps.Cgroups, m.cgroups, cgroups, "cgroup"),
		m.maps.Hosts.Set(uint32(len(m.cgroups))),
	)
	var near [4096]uint8 // NEAR
	for d, v := range m.devices {
		bits := pass(hookReceive) | pass(hookQueue) | pass(hookXmit)
		switch v & roleMask {
		case roleContainer:
			bits = begin(hookQueue) | begin(hookReceive) | pass(hookReceive) | pass(hookXmit)
		case roleHostEnd:
			bits |= begin(hookQueue)
		case roleUplink:
			bits |= begin(hookPoll) | begin(hookReceive)
			if len(m.cgroups) > 0 {
				bits |= begin(hookQueue)
			}
		}
		near[d.Ifindex%uint32(len(near))] |= bits
	}
	return errors.Join(err, m.maps.Near.Set(near))
}

// bring makes a map hold what is wanted; have is what it holds, and is kept true
// when something fails.
func bring[K comparable](to *ebpf.Map, have, want map[K]uint32, what string) error {
	var errs []error
	for k := range have {
		if _, wanted := want[k]; wanted {
			continue
		}
		if err := to.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("forget %s: %w", what, err))
			continue
		}
		delete(have, k)
	}
	for k, v := range want {
		if old, known := have[k]; known && old == v {
			continue
		}
		if err := to.Put(k, v); err != nil {
			errs = append(errs, fmt.Errorf("note %s: %w", what, err))
			continue
		}
		have[k] = v
	}
	return errors.Join(errs...)
}

// queue has packets looked at where they are put into a backlog, or not.
func (m *meter) queue(want bool) (err error) {
	switch {
	case want && m.queued == nil:
		m.queued, err = m.object.Attach(latencyProgFlBacklog)
	case !want && m.queued != nil:
		err = m.queued.Close()
		m.queued = nil
	}
	return err
}

// listen has the sockets of these cgroups measured, and no others': dirs are
// directories of cgroup v2, with whose sockets are there.
func (m *meter) listen(dirs map[string]sockets) error {
	var errs []error
	for dir, l := range m.sockets {
		if _, wanted := dirs[dir]; !wanted {
			errs = append(errs, l.Close())
			delete(m.sockets, dir)
		}
	}
	for dir, s := range dirs {
		if m.sockets[dir] != nil {
			continue
		}
		l, err := m.attachSocket(dir, s)
		if errors.Is(err, unix.ENOENT) {
			continue // the container has gone; the Set will tell
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("measure sockets: %w", err))
			continue
		}
		m.sockets[dir] = l
	}
	return errors.Join(errs...)
}

// sockets are those of one tenant, and by which way packets come to them, as
// latency.bpf.c numbers these.
type sockets struct {
	slot identity.Slot
	way  uint8
}

const (
	byDevice = iota
	byUplink
	byMacvlan
)

func (m *meter) attachSocket(dir string, s sockets) (link.Link, error) {
	p, err := m.object.Program(latencyProgFlSocket, bpf.Vars{latencyVarFlSlot: uint32(s.slot), latencyVarFlWay: s.way})
	if err != nil {
		return nil, err
	}
	defer p.Close()
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return link.AttachRawLink(link.RawLinkOptions{Target: int(f.Fd()), Program: p, Attach: ebpf.AttachCGroupInetIngress})
}

// passed says how many events were passed over, and how many stamps of packets
// that were nobody's yet were lost, since the meter was opened.
func (m *meter) passed() (events, evicted uint64, err error) {
	var cpus []latencyCpu
	if err := m.maps.CPUs.Lookup(uint32(0), &cpus); err != nil {
		return 0, 0, fmt.Errorf("read counters: %w", err)
	}
	for _, c := range cpus {
		events += c.Passed
		evicted += c.Evicted
	}
	return events, evicted, nil
}

// attached says what is in the kernel, for tests.
func (m *meter) attached() (programs, sockets int) {
	return len(m.links), len(m.sockets)
}

// supported says why nothing can be measured on this kernel; nil: it can.
func supported() error {
	o, err := bpf.Open("latency", loadLatency, nil, nil)
	if err != nil {
		return err
	}
	p, err := o.Program(latencyProgFlPoll, nil)
	if err != nil {
		return errors.Join(err, o.Close())
	}
	return errors.Join(p.Close(), o.Close())
}
