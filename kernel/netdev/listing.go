package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listing lists the devices of one namespace. It asks the kernel again only for those
// that have changed, or whose addresses have. It is for a namespace with a device for
// each container, which is looked at for each container. Its socket keeps the namespace
// alive until Close. It is safe for concurrent use.
type Listing struct {
	mu    sync.Mutex
	path  string // to the namespace
	f     *os.File
	conn  syscall.RawConn
	links []Link
	known bool // links is what there is, but for what the kernel has told of since
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
	// From before the first list, so that no change falls between the two.
	f, conn, err := ns.listen(deviceGroups)
	if err != nil {
		return nil, err
	}
	return &Listing{path: path, f: f, conn: conn}, nil
}

// Links is [NS.Links] of at most [MostLinks]. The kernel queues the message about a
// change before whoever made it goes on, so a caller sees what was there before the
// call. The exception is an IPv6 address, of which the kernel tells once it has found
// that nobody else has it. The caller must not change the list.
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
	// A list of all costs about as much as asking for a few by themselves.
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

// devicesTold reads all pending messages, and gives the devices that they are about. lost
// says that there were more. Anybody may send such messages, so they say nothing but
// where to look.
func devicesTold(fd int) (changed map[int]bool, lost bool) {
	changed = make(map[int]bool)
	buf := make([]byte, 32<<10)
	for range maxDrain {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			return changed, lost
		}
		if err != nil { // ENOBUFS
			lost = true
			continue
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		for _, m := range messages {
			// struct ifinfomsg, struct ifaddrmsg and struct tcmsg have the index at the same place.
			if len(m.Data) < 8 {
				lost = true
				continue
			}
			changed[int(int32(binary.NativeEndian.Uint32(m.Data[4:])))] = true
		}
		lost = lost || err != nil
	}
	return changed, true
}

// Close ends the Listing.
func (l *Listing) Close() error { return l.f.Close() }
