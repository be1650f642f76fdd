package drop

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// Nobody is the slot of a queue that brings no tenant's packets alone.
const Nobody = ^uint32(0)

// Queue is what a receive queue of an uplink has brought, in packets.
type Queue struct {
	Own    uint64 // for the same tenant as the one before
	Others uint64 // for somebody else than the one before
	Stale  uint64 // to an address that was a tenant's before a pause
	Slot   uint32 // the tenant of the last one, or Nobody
}

// Since returns what has come since before.
func (q Queue) Since(before Queue) Queue {
	return Queue{q.Own - before.Own, q.Others - before.Others, q.Stale - before.Stale, q.Slot}
}

// CountQueue begins to count what the queue brings that a NAPI polls.
func (d *Dropper) CountQueue(napi int) error {
	if err := d.maps.FlQueues.Put(uint32(napi), dropQueue{Slot: Nobody}); err != nil {
		return fmt.Errorf("count what the queue of napi %d brings: %w", napi, err)
	}
	return nil
}

// Queue returns those counters.
func (d *Dropper) Queue(napi int) (Queue, error) {
	var q dropQueue
	if err := d.maps.FlQueues.Lookup(uint32(napi), &q); err != nil {
		return Queue{}, fmt.Errorf("read what the queue of napi %d brought: %w", napi, err)
	}
	return Queue{q.Own, q.Others, q.Stale, q.Slot}, nil
}

// ForgetQueue ends it.
func (d *Dropper) ForgetQueue(napi int) error {
	if err := d.maps.FlQueues.Delete(uint32(napi)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
