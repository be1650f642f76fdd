package netdev

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
)

// Listing lists the devices of one namespace, and asks the kernel again only after a
// device or an address has changed there. It is for a namespace with a device for each
// container, which is looked at for each container. It keeps the namespace alive until
// Close, and is safe for concurrent use.
type Listing struct {
	mu    sync.Mutex
	ns    *NS
	f     *os.File
	conn  syscall.RawConn
	links []Link
	known bool // links is what there is, unless the kernel has sent something since
	lists int
}

// NewListing makes a Listing of a namespace, which may be closed afterwards.
func NewListing(ns *NS) (*Listing, error) {
	// From before the first list, so that no change falls between the two.
	f, conn, err := ns.listen()
	if err != nil {
		return nil, err
	}
	dup, err := ns.Dup()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Listing{ns: dup, f: f, conn: conn}, nil
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
		return nil, fmt.Errorf("list links of netns %d: %w", l.ns.Inode(), err)
	}
	if !l.known || changed {
		links, err := l.ns.Links(MostLinks)
		l.lists++
		if err != nil {
			l.known = false
			return nil, err
		}
		l.links, l.known = links, true
	}
	return slices.Clone(l.links), nil
}

// Close ends the Listing.
func (l *Listing) Close() error {
	return errors.Join(l.f.Close(), l.ns.Close())
}
