package identity

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
)

// Cgroups maintains a feature's BPF map from cgroup v2 id (8 bytes) to the feature's number
// of the cgroup's container (4 bytes). It is for attributes of single containers that share
// a network; attributes of their tenant are in an array indexed by Slot. Make it with
// Identity.Cgroups. It is not safe for concurrent use.
type Cgroups struct {
	cgroups
	identity *Identity
	told     map[container.ID]*entry
	last     int // nth of the last entry
}

// Cgroups returns a Cgroups for an empty map, which the caller owns. Errors call the
// content what, a plural.
func (i *Identity) Cgroups(to *ebpf.Map, what string) *Cgroups {
	return &Cgroups{cgroups: newCgroups(to, what), identity: i, told: make(map[container.ID]*entry)}
}

// Tell gives the cgroups of a container a number, and replaces its earlier registration. A
// cgroup that two containers list gets the number of the one with the higher Rank, and of
// the earlier among equals. On an error some cgroups had no room; the rest is in force.
// Repeating a registration costs nothing.
func (c *Cgroups) Tell(m Member, number uint16) error {
	e := c.told[m.ID]
	if e != nil && c.stated.settled() && e.Rank == m.Rank && e.slot == Slot(number) && slices.Equal(e.Cgroups, m.Cgroups) {
		return c.missing(m)
	}
	if e == nil {
		c.last++
		e = &entry{nth: c.last}
		c.told[m.ID] = e
	} else {
		c.remove(e)
	}
	e.Member, e.slot = Member{ID: m.ID, Rank: m.Rank, Cgroups: slices.Clone(m.Cgroups)}, Slot(number)
	c.add(e)
	return errors.Join(c.bring(), c.missing(m))
}

// Forget removes a registration. It succeeds if there is none.
func (c *Cgroups) Forget(id container.ID) error {
	e := c.told[id]
	if e == nil {
		return nil
	}
	delete(c.told, id)
	c.remove(e)
	return c.bring()
}

func (c *Cgroups) bring() error {
	changed, err := c.sync()
	if changed {
		err = errors.Join(err, c.identity.Changed())
	}
	return err
}

// cgroups holds the entries of each cgroup, and the BPF map with their slots. When the map
// is too small, entries share the room in turns, so that a container with many cgroups
// cannot displace the others.
type cgroups struct {
	stated  stated[uint64, uint32]
	to      *ebpf.Map
	what    string // content, for errors
	room    int
	crowded bool // the room did not suffice
}

func newCgroups(to *ebpf.Map, what string) cgroups {
	return cgroups{stated: newStated[uint64, uint32](), to: to, what: what, room: int(to.MaxEntries())}
}

// add adds the cgroups of an entry, which must not change until remove.
func (c *cgroups) add(e *entry) {
	for _, id := range e.Cgroups {
		c.stated.add(id, e)
	}
}

// remove undoes add.
func (c *cgroups) remove(e *entry) {
	for _, id := range e.Cgroups {
		c.stated.remove(id, e)
	}
}

// sync writes the entries to the map.
func (c *cgroups) sync() (changed bool, err error) {
	return c.stated.bring(c.to, c.wanted(), c.what)
}

// missing returns an error if some cgroups of a member had no room.
func (c *cgroups) missing(m Member) error {
	n := 0
	for _, id := range m.Cgroups {
		if _, ok := c.stated.held[id]; !ok {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("note %s: no room for %d of %d", c.what, n, len(m.Cgroups))
}

// wanted returns a function that looks up the slot of a cgroup.
func (c *cgroups) wanted() func(id uint64) (slot uint32, known bool) {
	by := c.stated.by
	crowded := len(by) > c.room
	if crowded || c.crowded { // any cgroup may have to go, or come
		for id := range by {
			c.stated.stale[id] = true
		}
	}
	c.crowded = crowded
	var let map[uint64]bool
	if crowded {
		let = c.turns()
	}
	return func(id uint64) (uint32, bool) {
		if crowded && !let[id] {
			return 0, false
		}
		// A container's own cgroup comes earlier in its list than those below it, so a
		// nested container owns its cgroups.
		deep := func(a, b *entry) int { return cmp.Compare(slices.Index(a.Cgroups, id), slices.Index(b.Cgroups, id)) }
		for _, e := range slices.SortedStableFunc(slices.Values(by[id]), deep) {
			if e.slot != Nobody {
				return uint32(e.slot), true
			}
		}
		return 0, len(by[id]) > 0
	}
}

// turns selects the cgroups that get the room.
func (c *cgroups) turns() map[uint64]bool {
	those := make(map[*entry]bool)
	for _, by := range c.stated.by {
		for _, e := range by {
			those[e] = true
		}
	}
	list := slices.SortedFunc(maps.Keys(those), precedence)
	let := make(map[uint64]bool, c.room)
	for turn, more := 0, true; more; turn++ {
		more = false
		for _, e := range list {
			if turn < len(e.Cgroups) {
				more = true
				if len(let) < c.room {
					let[e.Cgroups[turn]] = true
				}
			}
		}
	}
	return let
}
