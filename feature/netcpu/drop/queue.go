package drop

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// Nobody is the slot of a queue that does not serve exactly one tenant.
const Nobody = ^uint32(0)

// Queue holds the packet counts of a receive queue of an uplink.
type Queue struct {
	Own    uint64 // packets for the same tenant as the previous packet
	Others uint64 // packets for another tenant than the previous packet
	Stale  uint64 // packets to an address that a tenant had before a pause
	Slot   uint32 // tenant of the last packet, or Nobody
}

// CountQueue starts to count the packets of the queue that a NAPI polls.
func (d *Dropper) CountQueue(napi int) error {
	if err := d.maps.FlQueues.Put(uint32(napi), dropQueue{Slot: Nobody}); err != nil {
		return fmt.Errorf("count what the queue of napi %d brings: %w", napi, err)
	}
	return nil
}

// Queue returns the counters of a queue.
func (d *Dropper) Queue(napi int) (Queue, error) {
	var q dropQueue
	if err := d.maps.FlQueues.Lookup(uint32(napi), &q); err != nil {
		return Queue{}, fmt.Errorf("read what the queue of napi %d brought: %w", napi, err)
	}
	return Queue{q.Own, q.Others, q.Stale, q.Slot}, nil
}

// ForgetQueue stops counting the packets of a queue.
func (d *Dropper) ForgetQueue(napi int) error {
	if err := d.maps.FlQueues.Delete(uint32(napi)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// Others returns the number of packets at the uplinks for no isolated container. It falls when a charged
// tenant ends.
func (d *Dropper) Others() (sum uint64, err error) {
	var each []uint64 // by CPU
	if err := d.maps.FlOthers.Lookup(uint32(0), &each); err != nil {
		return 0, fmt.Errorf("read what came by the uplinks: %w", err)
	}
	for _, n := range each {
		sum += n
	}
	for _, c := range d.Counters() {
		if c.Charged {
			sum += c.Arrived
		}
	}
	return sum, nil
}
