package netdev

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
)

// Listing lists the devices of one namespace, and asks the kernel again only after a
// device or an address has changed there. It is for a namespace with a device for each
// container, which is looked at for each container. Its socket keeps the namespace alive
// until Close. It is safe for concurrent use.
type Listing struct {
	mu    sync.Mutex
	path  string // to the namespace
	f     *os.File
	conn  syscall.RawConn
	links []Link
	known bool // links is what there is, unless the kernel has sent something since
	lists int
}

// NewListing makes a Listing of the namespace at a path, which has to lead to it until Close.
func NewListing(path string) (*Listing, error) {
	ns, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	// From before the first list, so that no change falls between the two.
	f, conn, err := ns.listen()
	if err != nil {
		return nil, err
	}
	return &Listing{path: path, f: f, conn: conn}, nil
}

// Links is [NS.Links] of at most [MostLinks]. The kernel queues the message about a
// change before whoever made it goes on, so a caller sees what was there before the
// call. The exception is an IPv6 address, of which the kernel tells once it has found
// that nobody else has it. The caller may change the list, but not the addresses in it.
func (l *Listing) Links() ([]Link, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed := false
	if err := l.conn.Control(func(fd uintptr) { changed = drain(int(fd)) }); err != nil {
		return nil, fmt.Errorf("list links of %s: %w", l.path, err)
	}
	if !l.known || changed {
		links, err := l.list()
		if err != nil {
			l.known = false
			return nil, err
		}
		l.links, l.known = links, true
	}
	return slices.Clone(l.links), nil
}

// list asks the kernel.
func (l *Listing) list() ([]Link, error) {
	ns, err := Open(l.path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	l.lists++
	return ns.Links(MostLinks)
}

// Close ends the Listing.
func (l *Listing) Close() error { return l.f.Close() }
