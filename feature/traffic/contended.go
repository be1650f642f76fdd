package traffic

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/contend"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Limits of the reads while packets wait at an uplink without our classes.
const (
	looksApart = 20 * time.Millisecond // several readers share one reading
	mostSocks  = 4096                  // of each network namespace and address family
	mostOwn    = 64                    // devices of a container
	mostSpaces = 256                   // network namespaces
)

// contention is what containers have lost at uplinks without our classes. Its zero value is ready.
type contention struct {
	mu    sync.Mutex
	taken time.Time
	seen  map[int]contend.Uplink // by index: the uplinks at which packets waited
	lost  map[lostAt]contended
}

type lostAt struct {
	container container.ID
	uplink    string
}

// contended is the time that a container lost, in seconds: one second at half of its speed counts as
// half a second.
type contended struct {
	seconds float64
	culprit container.ID
}

// contention reads the uplinks, and adds the losses since the last reading. While no packets wait at
// any uplink, it reads nothing else.
func (f *Traffic) contention() []api.TrafficContended {
	c := &f.contends
	c.mu.Lock()
	defer c.mu.Unlock()
	now := f.cfg.Now()
	if now.Sub(c.taken) >= looksApart {
		c.taken = now
		c.add(f.waiting())
	}
	if f.cfg.Containers == nil {
		return nil
	}
	for at := range c.lost {
		if _, runs := f.cfg.Containers.Lookup(at.container); !runs {
			delete(c.lost, at)
		}
	}
	var out []api.TrafficContended
	for at, l := range c.lost {
		out = append(out, api.TrafficContended{
			Container: api.ID(at.container), Name: nameOf(f.cfg.Containers.Lookup(at.container)), Uplink: at.uplink, Lost: l.seconds,
			Culprit: api.ID(l.culprit), CulpritName: nameOf(f.cfg.Containers.Lookup(l.culprit)),
		})
	}
	slices.SortFunc(out, func(a, b api.TrafficContended) int {
		return cmp.Or(cmp.Compare(a.Uplink, b.Uplink), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container))
	})
	return out
}

// add compares the uplinks at which packets wait with the last reading.
func (c *contention) add(seen map[int]contend.Uplink, names map[int]string) {
	for index, now := range seen {
		was, waited := c.seen[index]
		if !waited {
			continue
		}
		for id, l := range contend.Losses(was, now) {
			if c.lost == nil {
				c.lost = make(map[lostAt]contended)
			}
			at := lostAt{id, names[index]}
			c.lost[at] = contended{c.lost[at].seconds + l.Part*now.Taken.Sub(was.Taken).Seconds(), l.Culprit}
		}
	}
	c.seen = seen
}

// waiting returns the uplinks without our classes at which packets wait, with the sockets that may be
// the cause, and the names of these uplinks.
func (f *Traffic) waiting() (seen map[int]contend.Uplink, names map[int]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host == nil || f.programs == nil || f.cfg.Containers == nil {
		return nil, nil
	}
	links, err := f.present()
	if err != nil {
		return nil, nil // the feature's status reports it
	}
	seen, names = make(map[int]contend.Uplink), make(map[int]string)
	for _, l := range links {
		if u := f.uplinks[l.Index]; u != nil && u.out.claimed {
			continue
		}
		stats, err := qdisc.RootStats(f.host, l.Index)
		if err != nil || stats.Backlog == 0 {
			continue
		}
		rate, _, _ := f.rate(l)
		seen[l.Index], names[l.Index] = contend.Uplink{Taken: f.cfg.Now(), Rate: rate, Stats: stats}, l.Name
	}
	if len(seen) == 0 {
		return nil, nil
	}
	senders, sent := f.senders()
	for index, u := range seen {
		u.Senders, u.Sent = senders, sent
		seen[index] = u
	}
	return seen, names
}

// senders lists all container sockets with data that they may not send yet, and the bytes that each
// container has sent. Among containers that share a network, the first stands for all.
func (f *Traffic) senders() (list map[uint64]contend.Sender, sent map[container.ID]uint64) {
	list, sent = make(map[uint64]contend.Sender), make(map[container.ID]uint64)
	hosts := make(map[container.ID]bool)
	for _, c := range f.cfg.Containers.Running() {
		if c.HostNetwork {
			hosts[c.ID] = true
		}
	}
	looked := 0
	f.spaces(func(c container.Container, ns *netdev.NS) {
		if looked++; looked > mostSpaces {
			return
		}
		socks, err := ns.Senders(mostSocks)
		if err == nil && len(socks) > 0 {
			sent[c.ID] = bytesSent(ns)
		}
		for _, s := range socks {
			list[s.Cookie] = contend.Sender{Container: c.ID, Sender: s}
		}
	})
	if len(hosts) == 0 {
		return list, sent
	}
	socks, _ := f.host.Senders(mostSocks) // empty after an error
	for _, s := range socks {
		if id := container.ID(s.Cgroup); hosts[id] {
			list[s.Cookie] = contend.Sender{Container: id, Sender: s}
		}
	}
	return list, sent
}

// bytesSent sums what the devices of a container have sent, without lo; 0 if that cannot be read.
func bytesSent(ns *netdev.NS) (n uint64) {
	const lo = 1
	all, err := ns.AllCounters(mostOwn)
	if err != nil {
		return 0
	}
	delete(all, lo)
	for _, c := range all {
		n += c.TxBytes
	}
	return n
}
