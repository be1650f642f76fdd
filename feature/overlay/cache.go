package overlay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/conntrack"
)

// Flags of struct network and struct end; maps.bpf.h.
const (
	netOn     = 1
	netRouted = 4
	netTOS    = 8

	netLiberal = 16

	wayPeer = 1
	wayEnd  = 2
	wayOut  = 4
)

// A beat allows renewal of the caches for vouched. beat is the interval of beats, which stop once the
// feature has hung for patience. After a change nothing is learnt for settle, a tick of the programs'
// clock, because packets in flight may predate the change. A flow is over once its lease has expired
// for kept; maps.bpf.h.
const (
	kept     = 2 * time.Second
	vouched  = 3 * time.Second
	beat     = 100 * time.Millisecond
	patience = 5 * time.Second
	settle   = 10 * time.Millisecond
)

// cache holds the BPF maps, and the programs that use them. The caller tracks the networks and the
// attachments.
type cache struct {
	object   *bpf.Object
	maps     overlayMaps
	ready    *ebpf.Program
	tracks   bool             // the kernel has bpf_skb_ct_lookup
	secret   uint64           // hashes flows to their places in fl_ov_sights
	held     map[uint32]int64 // flows in each slot, as of the last sweep; 0: all flows
	programs map[copyOf]*ebpf.Program
}

// copyOf identifies a program's copy for one network; 0: for all.
type copyOf struct {
	name    string
	network uint32
}

// openCache makes the maps. shared are the maps of package identity.
func openCache(shared bpf.Maps) (_ *cache, err error) {
	c := &cache{programs: make(map[copyOf]*ebpf.Program), secret: rand.Uint64(), held: make(map[uint32]int64)}
	if c.object, err = bpf.Open("overlay", loadOverlay, nil, shared); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if err := c.object.Load(&c.maps, nil); err != nil {
		return nil, err
	}
	if c.tracks, err = tracks(); err != nil {
		return nil, err
	}
	c.ready, err = c.object.Program("fl_ov_ready", nil)
	return c, err
}

// tracks reports whether programs can look up connections. If connection tracking is a module, that
// requires the module to be loaded.
func tracks() (bool, error) {
	var found bool
	err := bpf.WithTypes(func(types *btf.Cache) error {
		var fn *btf.Func
		spec, err := types.Kernel()
		if err != nil {
			return err
		}
		if err = spec.TypeByName("bpf_skb_ct_lookup", &fn); errors.Is(err, btf.ErrNotFound) {
			if spec, err = types.Module("nf_conntrack"); err == nil {
				err = spec.TypeByName("bpf_skb_ct_lookup", &fn)
			}
		}
		if found = err == nil; errors.Is(err, btf.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("look for bpf_skb_ct_lookup: %w", err)
	}
	return found, nil
}

func (c *cache) close() error {
	var errs []error
	for _, p := range c.programs {
		errs = append(errs, p.Close())
	}
	if c.ready != nil {
		errs = append(errs, c.ready.Close())
	}
	return errors.Join(append(errs, c.object.Close())...)
}

// program returns a loader of a program's copy for a network, loaded once. The caller closes it.
func (c *cache) program(name string, network uint32) func() (*ebpf.Program, error) {
	return func() (*ebpf.Program, error) {
		key := copyOf{name, network}
		p := c.programs[key]
		if p == nil {
			var err error
			if p, err = c.object.Program(name, bpf.Vars{"fl_ov_net": network, "fl_ov_tracks": c.tracks, "fl_ov_secret": c.secret}); err != nil {
				return nil, err
			}
			c.programs[key] = p
		}
		return p.Clone()
	}
}

// forget closes the programs of a network, and deletes its counters, so that the next network with this
// number starts anew.
func (c *cache) forget(network uint32) error {
	errs := []error{c.maps.FlOvNets.Put(network, overlayNetwork{}), zero[overlayCounts](c.maps.FlOvCounts, network)}
	for key, p := range c.programs {
		if key.network == network {
			errs = append(errs, p.Close())
			delete(c.programs, key)
		}
	}
	return errors.Join(errs...)
}

// beat allows renewal of learnt entries for vouched.
func (c *cache) beat() error {
	return c.maps.FlOvBeat.Put(uint32(0), bpf.Clock()+uint64(vouched))
}

// sweep deletes flows that are over, and counts the others. The count limits the flows of one end.
func (c *cache) sweep() error {
	var cursor ebpf.MapBatchCursor
	var errs []error
	keys := make([]overlayFlowKey, 4096)
	values := make([]overlayFlow, len(keys))
	now := bpf.Clock()
	for slot := range c.held {
		c.held[slot] = 0 // even if no flow is left: the programs may have counted since the last write
	}
	c.held[0] = 0
	for more := true; more; {
		n, err := c.maps.FlOvFlows.BatchLookup(&cursor, keys, values, nil)
		if more = err == nil; !more && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("look through flows of the overlay: %w", err)
		}
		for i, v := range values[:n] {
			if age(v, now) > lease+kept {
				errs = append(errs, absent(c.maps.FlOvFlows.Delete(keys[i])))
				c.held[v.Slot] += 0
				continue
			}
			c.held[v.Slot]++
			c.held[0]++
		}
	}
	for slot, n := range c.held {
		errs = append(errs, c.maps.FlOvHeld.Put(slot, n))
		if n == 0 {
			delete(c.held, slot)
		}
	}
	return errors.Join(errs...)
}

// asked is a flow that is ready to become fast, except for conntrack.
type asked struct {
	network uint32
	tuple   conntrack.Tuple
	key     overlayFlowKey
}

// asks calls answer with flows for which conntrack has to be prepared, until ctx ends. Flows that get
// true become fast.
func (c *cache) asks(ctx context.Context, answer func([]asked) []bool) error {
	r, err := ringbuf.NewReader(c.maps.FlOvAsks)
	if err != nil {
		return fmt.Errorf("read asks of the overlay: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { r.Close() })
	defer stop()
	for {
		var list []asked
		var record ringbuf.Record
		r.SetDeadline(time.Time{})
		for len(list) < 64 {
			err := r.ReadInto(&record)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				if ctx.Err() != nil || errors.Is(err, ringbuf.ErrClosed) {
					return nil
				}
				return fmt.Errorf("read asks of the overlay: %w", err)
			}
			var a asked
			if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &a.key); err != nil {
				return fmt.Errorf("read asks of the overlay: %w", err)
			}
			var of overlayFlow
			if c.maps.FlOvFlows.Lookup(a.key, &of) != nil {
				continue // the flow has ended
			}
			a.network = a.key.Net
			a.tuple = conntrack.Tuple{Source: addrPort(a.key.Local.Ip, a.key.Lport), Destination: addrPort(a.key.Remote.Ip, a.key.Rport)}
			if of.Dir[out].Until == 0 { // behind NAT, conntrack knows a flow only by its received packets
				a.tuple.Source, a.tuple.Destination = a.tuple.Destination, a.tuple.Source
			}
			list = append(list, a)
			r.SetDeadline(time.Unix(1, 0)) // take only what is already there
		}
		for i, yes := range answer(list) {
			if !yes {
				continue
			}
			if _, err := c.ready.Run(&ebpf.RunOptions{Context: &list[i].key}); err != nil {
				return fmt.Errorf("make a flow of the overlay fast: %w", err)
			}
		}
	}
}

func addrPort(ip [16]uint8, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(ip).Unmap(), fromNetwork(port))
}

// fromNetwork swaps the bytes of a number: the programs are built for little endian.
func fromNetwork(n uint16) uint16 { return n<<8 | n>>8 }

// absent ignores the error of deleting a missing entry.
func absent(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// unlearn deletes learnt addresses behind some host ends of a network.
func (c *cache) unlearn(number uint32, ends map[uint32]bool) error {
	var list []overlayHostKey
	var key overlayHostKey
	var value overlayLocal
	it := c.maps.FlOvLocals.Iterate()
	for it.Next(&key, &value) {
		if key.Net == number && ends[value.Ifindex] {
			list = append(list, key)
		}
	}
	errs := []error{it.Err()}
	for _, key := range list {
		errs = append(errs, absent(c.maps.FlOvLocals.Delete(key)))
	}
	return errors.Join(errs...)
}

// zero deletes the counters of a network or of an end.
func zero[V any](m *ebpf.Map, key uint32) error {
	n, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return m.Put(key, make([]V, n))
}
