package netdev

import (
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// mostWaiting bounds the messages that wait for the next use of a listing. Beyond that, listing all
// devices costs no more.
const mostWaiting = 256

// listing is the list of devices of a namespace, kept up to date by the messages about them. The
// zero value knows nothing.
type listing struct {
	known   bool
	links   []Link // in order of Index; replaced by a change, as callers keep the old one
	waiting []syscall.NetlinkMessage
}

// hear takes a message about a device or an address.
func (l *listing) hear(m syscall.NetlinkMessage) {
	switch {
	case !l.known:
	case len(l.waiting) == mostWaiting:
		*l = listing{}
	default:
		m.Data = slices.Clone(m.Data)
		l.waiting = append(l.waiting, m)
	}
}

// all is [NS.Links], of the namespace of the listing.
func (l *listing) all(ns *NS, most int) ([]Link, error) {
	l.renew()
	l.pair(ns)
	if l.known && len(l.links) <= most {
		return l.links, nil
	}
	links, err := ns.Links(most)
	if err == nil {
		slices.SortFunc(links, func(a, b Link) int { return a.Index - b.Index })
		*l = listing{known: true, links: slices.Clip(links)}
	}
	return links, err
}

// renew applies the waiting messages.
func (l *listing) renew() {
	if len(l.waiting) == 0 {
		return
	}
	links := slices.Clone(l.links)
	for _, m := range l.waiting {
		index := aboutDevice(m.Data)
		at, found := slices.BinarySearchFunc(links, index, func(l Link, index int) int { return l.Index - index })
		switch {
		case m.Header.Type == unix.RTM_NEWADDR || m.Header.Type == unix.RTM_DELADDR:
			_, prefix, err := parseAddr(m.Data)
			if err != nil || found && !links[at].address(prefix, m.Header.Type == unix.RTM_NEWADDR) {
				*l = listing{}
				return
			}
		case m.Data[0] != unix.AF_UNSPEC: // the device's state as a port of a bridge
		case m.Header.Type == unix.RTM_DELLINK:
			if found {
				links = slices.Delete(links, at, at+1)
			}
		default:
			link, err := parseLink(m.Data)
			switch {
			case err != nil:
				*l = listing{}
				return
			case link.TxQueues == 0: // a wireless event, without attributes of the device
			case found:
				link.Addrs = links[at].Addrs
				links[at] = link
			default:
				links = slices.Insert(links, at, link)
			}
		}
	}
	l.links, l.waiting = slices.Clip(links), nil
}

// pair queries devices whose peer was unknown when the kernel reported them: of a pair it registers
// the peer first (drivers/net/veth.c, veth_newlink).
func (l *listing) pair(ns *NS) {
	for i, link := range l.links {
		if link.Peer != 0 || link.Kind != "veth" && link.Kind != "netkit" {
			continue
		}
		// A device that has just gone has none, and the message about that is waiting.
		if now, err := ns.Link(link.Index); err == nil && now.Peer != 0 {
			now.Addrs = link.Addrs
			l.links = slices.Clone(l.links)
			l.links[i] = now
		}
	}
}

// address adds or removes an address. It returns false if addresses were left out earlier, because
// one of them may take its place.
func (l *Link) address(prefix string, there bool) bool {
	i := slices.Index(l.Addrs, prefix)
	switch {
	case prefix == "" || there == (i >= 0):
	case !there && len(l.Addrs) == maxAddrs:
		return false
	case !there:
		l.Addrs = slices.Delete(slices.Clone(l.Addrs), i, i+1)
	case len(l.Addrs) < maxAddrs:
		l.Addrs = append(slices.Clip(l.Addrs), prefix)
	}
	return true
}
