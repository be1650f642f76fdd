// Package delay measures, by class, how long packets wait in the root qdiscs of feature traffic.
// Its programs are attached only while a Meter is open, because both of its hooks see every packet
// of the host. It does not measure the wait inside a device, nor that of packets that a device has
// returned to the qdisc.
//
// Package traffic calls it.
package delay

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/kernel/bpf"
)

// Class is one class of the root qdisc of a device.
type Class struct {
	NetNS uint64 // inode of the device's network namespace
	Index int    // of the device
	Minor uint16
}

func (c Class) key() delayClass {
	return delayClass{Netns: uint32(c.NetNS), Ifindex: uint32(c.Index), Minor: uint32(c.Minor)}
}

// Meter measures until it is closed. One goroutine at a time calls its methods.
type Meter struct {
	object *bpf.Object
	links  bpf.Links
	objs   struct {
		Delays *ebpf.Map      `ebpf:"fl_delays"`
		Missed *ebpf.Variable `ebpf:"fl_missed"`
	}
	followed map[Class]bool
}

// Open starts to measure the given classes, as Follow does. host is the inode of the host's network
// namespace. Packets that already wait are not measured. The kernel must have BTF. The caller closes
// the Meter.
func Open(host uint64, classes []Class) (_ *Meter, err error) {
	m := &Meter{followed: make(map[Class]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("measure delays at qdiscs: %w", err), m.Close())
		}
	}()
	if m.object, err = bpf.Open("delay", loadDelay, bpf.Vars{delayVarFlHost: uint32(host)}, nil); err != nil {
		return nil, err
	}
	if err := m.object.Load(&m.objs, nil); err != nil {
		return nil, err
	}
	if err := m.Follow(classes); err != nil {
		return nil, err
	}
	// In the other order, the dequeue program would look up packets without a stamp.
	if m.links, err = m.object.Attach(delayProgFlEnqueue, delayProgFlDequeue); err != nil {
		return nil, err
	}
	return m, nil
}

// Supported returns why this kernel cannot measure delays, or nil.
func Supported() error {
	m, err := Open(0, nil)
	if err != nil {
		return err
	}
	return m.Close()
}

// Follow measures exactly the given classes from this call on. Classes that were already measured
// continue; the others start at zero. Packets of any other class count for the device's
// qdisc.MinorDefault, if that is measured. An error concerns some classes; the others are done.
func (m *Meter) Follow(classes []Class) error {
	var errs []error
	wanted := make(map[Class]bool, len(classes))
	for _, c := range classes {
		wanted[c] = true
	}
	for c := range m.followed { // first, to make room
		if wanted[c] {
			continue
		}
		if err := m.objs.Delays.Delete(c.key()); err != nil {
			errs = append(errs, fmt.Errorf("end to measure delays of class %04x at device %d: %w", c.Minor, c.Index, err))
			continue
		}
		delete(m.followed, c)
	}
	for _, c := range classes {
		if m.followed[c] {
			continue
		}
		if err := m.objs.Delays.Put(c.key(), new(delayDelays)); err != nil {
			errs = append(errs, fmt.Errorf("measure delays of class %04x at device %d: %w", c.Minor, c.Index, err))
			continue
		}
		m.followed[c] = true
	}
	return errors.Join(errs...)
}

// subBits is HIST_SUB_BITS of delay.bpf.c.
const subBits = 3

// Read returns the delays of one class so far, or nil if it is not followed.
func (m *Meter) Read(c Class) (*hist.Histogram, error) {
	if !m.followed[c] {
		return nil, nil
	}
	var d delayDelays
	if err := m.objs.Delays.Lookup(c.key(), &d); err != nil {
		return nil, fmt.Errorf("read delays at qdiscs: %w", err)
	}
	return &hist.Histogram{Sub: subBits, Counts: d.Count[:], Sum: d.Sum}, nil
}

// Missed returns how many packets were not measured because too many waited (some of 10,000, most
// of more than 65,536), or because more than 64 left in one batch.
func (m *Meter) Missed() (n uint64, err error) {
	if err := m.objs.Missed.Get(&n); err != nil {
		return 0, fmt.Errorf("read delays at qdiscs: %w", err)
	}
	return n, nil
}

// Maps returns how full the maps are.
func (m *Meter) Maps() []bpf.Usage { return m.object.Usage() }

// Close ends the measurement.
func (m *Meter) Close() error { return errors.Join(m.links.Close(), m.object.Close()) }
