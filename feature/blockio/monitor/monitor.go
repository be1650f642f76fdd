// Package monitor counts the block I/O of containers, and measures how long a container waits for a CPU
// and who runs meanwhile. Its programs are in the kernel only while a [Meter] is open: they see every
// request of the host, and for details every context switch. It judges nothing, and does not see I/O
// that a disk serves without requests (zram, md, device mapper).
//
// Package blockio calls it.
package monitor

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// Group is a container with its cgroups.
type Group struct {
	Container container.ID
	V2        uint64        // id of its cgroup in the v2 tree
	IO        uint64        // id of its cgroup with the io or blkio controller; 0: none
	Watched   bool          // measure how long it waits for CPUs
	Reserved  []decide.Disk // disks that it has reserved: it gets room before all others
}

// Account is the I/O of a container at a disk since the Meter was opened.
type Account struct {
	Container             container.ID // decide.System for I/O of no container
	Disk                  decide.Disk
	Reads, Writes         uint64 // requests completed; merged neighbours count once
	ReadBytes, WriteBytes uint64
	Errors                uint64          // completions with an error; no other figure includes them
	Last                  time.Duration   // since the last request was completed
	Under                 time.Duration   // from creation to completion of requests, summed up
	Queue                 *hist.Histogram // from creation of a request to its issue to the device; a detail
	Device                *hist.Histogram // from issue to completion; a detail
}

// Switches is a watched container's use of the CPUs since watching began; a detail.
type Switches struct {
	Container              container.ID
	Voluntary, Involuntary uint64          // context switches
	Foreign                uint64          // involuntary ones in favour of a task outside the container
	Wait                   *hist.Histogram // from being woken, or preempted, to running
}

// Wait is how long tasks of a watched container waited while another task ran on their CPU, summed over
// the waiting tasks. The culprit may be the container itself. The wait of a throttled task is charged
// to its limit, whichever task ran.
type Wait struct {
	Victim, Culprit container.ID
	For             time.Duration
	IO              time.Duration // part of For after the task had asked for I/O, or I/O had woken it
	Times           uint64
}

// Lost counts what found no room in a map and is missing from the figures.
type Lost struct {
	Accounts uint64 // requests of a container and disk beyond the 4,096 that there is room for
	Requests uint64 // requests without a latency, as too many were in flight; without details, those of a disk that records no times
	Waits    uint64 // waits of tasks
	Pairs    uint64 // waits without a culprit, as there were too many pairs
	Levels   uint64 // requests and runs attributed to the System in cgroups too deep to examine all their parents
}

// Reading is what a Meter has measured up to one moment.
type Reading struct {
	Taken    time.Time
	Accounts []Account
	Switches []Switches
	Waits    []Wait
	Detailed time.Duration // for how long details have been measured
	Lost     Lost
}

// Meter counts I/O from Open to Close. While Detail is on, it also measures details: waits for CPUs,
// and latencies. One goroutine at a time calls its methods.
type Meter struct {
	object *bpf.Object
	links  bpf.Links // of the program that counts
	detail struct {
		programs []*ebpf.Program // loaded
		links    bpf.Links       // nil: no details are measured
		since    time.Time       // when these were attached
		before   time.Duration   // how long earlier ones were attached, in all
	}
	objs struct {
		Groups   *ebpf.Map      `ebpf:"fl_groups"`
		IOGroups *ebpf.Map      `ebpf:"fl_iogroups"`
		Accounts *ebpf.Map      `ebpf:"fl_accounts"`
		Watched  *ebpf.Map      `ebpf:"fl_watched"`
		Waits    *ebpf.Map      `ebpf:"fl_waits"`
		Shown    *ebpf.Map      `ebpf:"fl_shown"`
		Lost     *ebpf.Variable `ebpf:"fl_lost"`
		Began    *ebpf.Variable `ebpf:"fl_began"`
	}
	groups, iogroups map[uint64]container.ID
	accounts         map[uint64]container.ID // by cgroup of fl_iogroups; 0: decide.System
	watched          map[container.ID]bool   // true: it has reserved something
}

// Open begins to count the I/O of the given containers, as Follow does, without details. The kernel
// must have BTF; the error names what is missing. The caller closes the Meter.
func Open(groups []Group) (_ *Meter, err error) {
	m := &Meter{groups: make(map[uint64]container.ID), iogroups: make(map[uint64]container.ID), watched: make(map[container.ID]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("measure block I/O: %w", err), m.Close())
		}
	}()
	if m.object, err = bpf.Open("monitor", loadMonitor, nil, nil); err != nil {
		return nil, err
	}
	if err := m.object.Load(&m.objs, nil); err != nil {
		return nil, err
	}
	if err := m.Follow(groups); err != nil {
		return nil, err
	}
	if m.links, err = m.object.Attach(monitorProgFlRqComplete); err != nil {
		return nil, err
	}
	// sched_switch comes first: it takes up what the others put down.
	m.detail.programs, err = m.object.Programs(monitorProgFlSwitch, monitorProgFlWakeup, monitorProgFlWakeupNew, monitorProgFlRqIssue)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Detail starts or stops measuring details. After an error no details are measured.
func (m *Meter) Detail(on bool) error {
	if on == m.Detailed() {
		return nil
	}
	const never = math.MaxUint64 // while some programs are not attached, no stamp counts, and none is missed
	d := &m.detail
	errs := []error{m.objs.Began.Set(uint64(never))}
	var began uint64
	if on {
		links, err := bpf.Attach(d.programs...)
		if err != nil {
			errs = append(errs, err, links.Close())
		} else {
			began, d.links, d.since = bpf.Clock(), links, time.Now()
		}
	} else {
		d.before += time.Since(d.since)
		errs = append(errs, d.links.Close())
		d.links = nil
	}
	errs = append(errs, m.objs.Began.Set(began))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("measure details of block I/O: %w", err)
	}
	return nil
}

// Detailed reports whether details are measured.
func (m *Meter) Detailed() bool { return m.detail.links != nil }

// Supported returns why this kernel cannot measure, or nil.
func Supported() error {
	m, err := Open(nil)
	if err != nil {
		return err
	}
	return errors.Join(m.Detail(true), m.Close())
}

// Follow measures the given containers from this call on, and no others: I/O of all others is the
// System's. After an error it continues with the remaining containers. Containers with reservations
// come first.
func (m *Meter) Follow(groups []Group) error {
	first := slices.SortedStableFunc(slices.Values(groups), func(a, b Group) int {
		return min(len(b.Reserved), 1) - min(len(a.Reserved), 1)
	})
	var v2, io []member
	var watched []Group
	m.accounts = map[uint64]container.ID{0: decide.System}
	known := map[container.ID]bool{decide.System: true, decide.Unseen: true, decide.Quota: true, decide.Realtime: true, decide.Stolen: true}
	for _, g := range first {
		known[g.Container] = true
		v2 = append(v2, member{g.V2, g.Container})
		if g.IO != 0 {
			io = append(io, member{g.IO, container.ID(g.IO)})
			m.accounts[g.IO] = g.Container
		}
		if g.Watched {
			watched = append(watched, g)
		}
	}
	err := errors.Join(
		bring(m.objs.Groups, m.groups, v2, number), bring(m.objs.IOGroups, m.iogroups, io, number), m.watch(watched),
		m.forget(func(id container.ID) bool { return known[id] }), m.account(first))
	if err != nil {
		return fmt.Errorf("follow containers: %w", err)
	}
	return nil
}

// watch measures how long the given containers wait for CPUs, and no others. If there is not enough
// room, the first ones come before the others.
func (m *Meter) watch(groups []Group) error {
	most := int(m.objs.Watched.MaxEntries())
	beyond := max(len(groups)-most, 0)
	groups = groups[:len(groups)-beyond]
	var want []entry[container.ID, bool]
	for _, g := range groups {
		want = append(want, entry[container.ID, bool]{g.Container, len(g.Reserved) > 0})
	}
	var errs []error
	if beyond > 0 {
		errs = append(errs, fmt.Errorf("waits for CPUs of %d containers are not measured, as there is room for %d", beyond, most))
	}
	errs = append(errs, bring(m.objs.Watched, m.watched, want, func(reserved bool) any {
		s := new(monitorSwitches) // counts start anew
		if !reserved {
			s.Shown = 1
		}
		return s
	}))
	return errors.Join(errs...)
}

// account makes accounts for what is reserved. If the map is full, it deletes accounts of others.
func (m *Meter) account(groups []Group) error {
	reserved := make(map[monitorPlace]bool)
	for _, g := range groups {
		for _, d := range g.Reserved {
			if g.IO != 0 {
				reserved[monitorPlace{Cgroup: g.IO, Major: d.Major, Minor: d.Minor}] = true
			}
		}
	}
	var errs []error
	for at := range reserved {
		var a monitorAccount
		err := m.objs.Accounts.Update(at, &a, ebpf.UpdateNoExist)
		for it, other := m.objs.Accounts.Iterate(), (monitorPlace{}); errors.Is(err, unix.E2BIG) && it.Next(&other, &a); {
			if !reserved[other] {
				err = errors.Join(m.objs.Accounts.Delete(other), m.objs.Accounts.Update(at, new(monitorAccount), ebpf.UpdateNoExist))
			}
		}
		if !errors.Is(err, ebpf.ErrKeyExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// entry is a key of a kernel map and its intended value.
type entry[K, V any] struct {
	key K
	of  V
}

// member is an entry of a map of cgroups: a cgroup's container, or the cgroup itself.
type member = entry[uint64, container.ID]

func number(id container.ID) any { return uint64(id) }

// bring changes a kernel map from was to want. Earlier entries of want come first.
func bring[K ~uint64, V comparable](m *ebpf.Map, was map[K]V, want []entry[K, V], value func(V) any) error {
	var errs []error
	wanted := make(map[K]bool, len(want))
	for _, e := range want {
		wanted[e.key] = true
	}
	for key := range was {
		if !wanted[key] {
			errs = append(errs, m.Delete(uint64(key)))
			delete(was, key)
		}
	}
	for _, e := range want {
		if of, is := was[e.key]; is && of == e.of {
			continue
		}
		if err := m.Put(uint64(e.key), value(e.of)); err != nil {
			errs = append(errs, err)
			continue
		}
		was[e.key] = e.of
	}
	return errors.Join(errs...)
}

// forget deletes the accounts and waits of unknown containers.
func (m *Meter) forget(known func(container.ID) bool) error {
	errs := []error{drop[monitorPlace, monitorAccount](m.objs.Accounts, func(at monitorPlace) bool {
		_, is := m.accounts[at.Cgroup]
		return !is
	})}
	for _, x := range []struct {
		waits    *ebpf.Map
		reserved bool
	}{{m.objs.Waits, true}, {m.objs.Shown, false}} {
		errs = append(errs, drop[monitorPair, monitorWait](x.waits, func(p monitorPair) bool {
			reserved, watched := m.watched[container.ID(p.Victim)]
			return !known(container.ID(p.Victim)) || !known(container.ID(p.Culprit)) || !watched || reserved != x.reserved
		}))
	}
	return errors.Join(errs...)
}

// drop deletes the matching keys of a map.
func drop[K, V any](m *ebpf.Map, which func(K) bool) error {
	var key K
	var value V
	var keys []K
	for it := m.Iterate(); it.Next(&key, &value); {
		if which(key) {
			keys = append(keys, key)
		}
	}
	var errs []error
	for _, k := range keys {
		if err := m.Delete(k); !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// subBits is HIST_SUB_BITS of monitor.bpf.c.
const subBits = 2

func histogram(counts []uint64, sum uint64) *hist.Histogram {
	return &hist.Histogram{Sub: subBits, Counts: append([]uint64(nil), counts...), Sum: sum}
}

// Read returns all measurements up to now. Rows are in no order.
func (m *Meter) Read() (Reading, error) {
	r := Reading{Taken: time.Now(), Detailed: m.detail.before}
	if m.Detailed() {
		r.Detailed += r.Taken.Sub(m.detail.since)
	}
	now := bpf.Clock()
	var at monitorPlace
	var a monitorAccount
	accounts := m.objs.Accounts.Iterate()
	for accounts.Next(&at, &a) {
		id, known := m.accounts[at.Cgroup]
		if !known {
			continue // of a container that is no longer followed
		}
		r.Accounts = append(r.Accounts, Account{
			Container: id, Disk: decide.Disk{Major: at.Major, Minor: at.Minor},
			Reads: a.Ios[0], Writes: a.Ios[1], ReadBytes: a.Bytes[0], WriteBytes: a.Bytes[1], Errors: a.Errors,
			Last: time.Duration(now - min(a.Last, now)), Under: time.Duration(a.Under),
			Queue: histogram(a.Queue[:], a.QueueSum), Device: histogram(a.Device[:], a.DeviceSum),
		})
	}
	errs := []error{accounts.Err()}
	for _, m := range []*ebpf.Map{m.objs.Waits, m.objs.Shown} {
		var p monitorPair
		var w monitorWait
		waits := m.Iterate()
		for waits.Next(&p, &w) {
			r.Waits = append(r.Waits, Wait{container.ID(p.Victim), container.ID(p.Culprit), time.Duration(w.Ns), time.Duration(w.Io), w.Times})
		}
		errs = append(errs, waits.Err())
	}
	for id := range m.watched {
		var s monitorSwitches
		if err := m.objs.Watched.Lookup(uint64(id), &s); err != nil {
			errs = append(errs, err)
			continue
		}
		r.Switches = append(r.Switches, Switches{
			Container: id, Voluntary: s.Voluntary, Involuntary: s.Involuntary, Foreign: s.Foreign, Wait: histogram(s.Wait[:], s.WaitSum),
		})
	}
	errs = append(errs, m.objs.Lost.Get(&r.Lost))
	if err := errors.Join(errs...); err != nil {
		return Reading{}, fmt.Errorf("read block I/O: %w", err)
	}
	return r, nil
}

// Maps returns how full the maps are.
func (m *Meter) Maps() []bpf.Usage { return m.object.Usage() }

// Close ends the measurement.
func (m *Meter) Close() error {
	errs := []error{m.links.Close()}
	if m.Detailed() {
		errs = append(errs, m.Detail(false))
	}
	for _, p := range m.detail.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(append(errs, m.object.Close())...)
}
