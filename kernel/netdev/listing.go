package netdev

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listing lists the devices of one namespace, and asks the kernel again only for changed ones. It
// is for a namespace with a device per container, which is looked at for each container. Its socket
// keeps the namespace alive until Close. It is safe for concurrent use.
type Listing struct {
	mu    sync.Mutex
	path  string // to the namespace
	f     *os.File
	conn  syscall.RawConn
	links []Link
	known bool // links is up to date, except for pending messages
	lists int
	asked int // for single devices
}

// NewListing makes a Listing of the namespace at a path, which has to lead to it until Close.
func NewListing(path string) (*Listing, error) {
	ns, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	// Before the first list, so that no change is missed.
	f, conn, err := ns.listen(unix.NETLINK_ROUTE, deviceGroups...)
	if err != nil {
		return nil, err
	}
	return &Listing{path: path, f: f, conn: conn}, nil
}

// Links is [NS.Links] of at most [MostLinks]. The kernel queues the message about a change before
// the changer's call returns, so a caller sees what was there before. The exception is an IPv6
// address, which the kernel reports after duplicate address detection. The caller must not change
// the list.
func (l *Listing) Links() ([]Link, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed, lost := map[int]bool(nil), false
	if err := l.conn.Control(func(fd uintptr) { changed, lost = devicesTold(int(fd)) }); err != nil {
		return nil, fmt.Errorf("list links of %s: %w", l.path, err)
	}
	if l.known && !lost && len(changed) == 0 {
		return l.links, nil
	}
	ns, err := Open(l.path)
	if err != nil {
		l.known = false
		return nil, err
	}
	defer ns.Close()
	// A list of all costs about as much as a few single requests.
	if l.known && !lost && len(changed) <= 16+len(l.links)/16 && l.renew(ns, changed) == nil {
		return l.links, nil
	}
	links, err := ns.Links(MostLinks)
	l.lists++
	if l.known = err == nil; err != nil {
		return nil, err
	}
	l.links = links
	return l.links, nil
}

// renew asks for single devices.
func (l *Listing) renew(ns *NS, changed map[int]bool) error {
	// Callers have the old list.
	links := slices.DeleteFunc(slices.Clone(l.links), func(old Link) bool { return changed[old.Index] })
	for index := range changed {
		l.asked++
		link, err := ns.Link(index)
		if errors.Is(err, ErrNoLink) {
			continue
		}
		if err == nil {
			err = ns.Do(func() error {
				return addresses(index, MostLinks, func(_ int, prefix string) {
					if len(link.Addrs) < maxAddrs {
						link.Addrs = append(link.Addrs, prefix)
					}
				})
			})
		}
		if err != nil {
			return err
		}
		links = append(links, link)
	}
	slices.SortFunc(links, func(a, b Link) int { return a.Index - b.Index })
	l.links = links
	return nil
}

// Close ends the Listing.
func (l *Listing) Close() error { return l.f.Close() }
