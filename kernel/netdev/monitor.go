package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	watchPause  = 5 * time.Millisecond // between two reads, and between two calls of a watch
	watchBuffer = 1 << 20              // bytes of a socket
	watchGone   = time.Second          // between two looks at a path
	readSize    = 32 << 10             // bytes of messages
	maxDrain    = 8192                 // reads, before the rest counts as lost
	mostChanges = 64                   // of one call
)

// Monitor listens to the kernel's notifications of changes in network namespaces, and lists their
// devices. All watches of a namespace share its sockets, and one list that the notifications keep
// up to date. It is safe for concurrent use. A nil Monitor works, too, but shares nothing.
type Monitor struct {
	mu     sync.Mutex
	spaces map[uint64]*space // those with a watch, by inode
	bufs   sync.Pool         // *[readSize]byte; shared, as most namespaces rarely receive anything
}

// NewMonitor makes a Monitor that watches nothing.
func NewMonitor() *Monitor {
	return &Monitor{spaces: make(map[uint64]*space), bufs: sync.Pool{New: func() any { return new([readSize]byte) }}}
}

// Interest says which changes a watch receives, and when.
type Interest struct {
	// Causes are the changes that it receives beside Overrun and Gone. A watch without Causes
	// receives nothing, and only keeps the list of devices up to date.
	Causes []Cause
	// Pause is the least time between the starts of two calls, at least 5 ms. The namespace's owner
	// can cause a call after each pause.
	Pause time.Duration
	// Path ends the watch about a second after the path no longer leads to the namespace, which the
	// watch would otherwise keep alive. "": it does not end.
	Path string
}

// Watch calls changed with distinct changes in the namespace, in the order of their messages,
// until stop is called. Calls come from one goroutine; one may still be under way when stop
// returns. If there are too many changes, or messages were lost, Overrun stands for all. The watch
// keeps the namespace alive, also after ns is closed.
//
// It reports neighbours and FDBs only if an entry has another address, port or VTEP, has gone, or
// has come for an address seen before. A neighbour that is probed again, or is new, is no change.
func (m *Monitor) Watch(ns *NS, about Interest, changed func([]Change)) (stop func() error, err error) {
	if m == nil {
		m = NewMonitor()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.spaces[ns.inode]
	if s == nil {
		s = &space{bufs: &m.bufs, sockets: make(map[feed]*socket), watches: make(map[*watch]bool)}
		if s.ns, err = ns.dup(); err != nil {
			return nil, err
		}
	}
	w := &watch{about: about, changed: changed, wake: make(chan struct{}, 1), stopped: make(chan struct{})}
	if err := s.begin(w); err != nil {
		return nil, errors.Join(fmt.Errorf("watch netns %d: %w", ns.inode, err), s.end(w))
	}
	m.spaces[ns.inode] = s
	stop = sync.OnceValue(func() error {
		close(w.stopped)
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(s.watches) == 1 {
			delete(m.spaces, s.ns.inode)
		}
		return s.end(w)
	})
	go w.run(s.ns.inode, stop)
	return stop, nil
}

// Links is [NS.Links]. For a watched namespace it is cheap: it queries the kernel again only after
// messages were lost. The kernel queues the message about a change before the changer's call
// returns, so a caller sees all earlier changes. The exception is an IPv6 address, which the kernel
// reports after duplicate address detection. The caller must not change the list; a change of a
// device replaces it.
func (m *Monitor) Links(ns *NS, most int) ([]Link, error) {
	if s := m.space(ns.inode); s != nil {
		return s.list(ns, most)
	}
	return ns.Links(most)
}

// Open opens a watched namespace; nil if there is no watch.
func (m *Monitor) Open(inode uint64) *NS {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.spaces[inode]
	if s == nil {
		return nil
	}
	ns, _ := s.ns.dup() // nil after an error: the caller then searches for it
	return ns
}

func (m *Monitor) space(inode uint64) *space {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.spaces[inode]
}

// watch is one caller of Watch.
type watch struct {
	about   Interest
	changed func([]Change)
	wake    chan struct{} // capacity 1
	stopped chan struct{}

	mu      sync.Mutex
	pending []Change // distinct
}

func (w *watch) run(inode uint64, stop func() error) {
	var look <-chan time.Time
	if w.about.Path != "" {
		tick := time.NewTicker(watchGone)
		defer tick.Stop()
		look = tick.C
	}
	for {
		select {
		case <-w.stopped:
			return
		case <-look:
			if !leads(w.about.Path, inode) {
				_ = stop() // closing sockets loses nothing
				w.changed([]Change{{Cause: Gone}})
				return
			}
			continue
		case <-w.wake:
		}
		began := time.Now()
		w.changed(w.take())
		select {
		case <-w.stopped:
			return
		case <-time.After(max(watchPause, w.about.Pause-time.Since(began))):
		}
	}
}

// take returns the pending changes.
func (w *watch) take() []Change {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := w.pending
	w.pending = nil
	return list
}

// tell adds a change if the watch is interested in it.
func (w *watch) tell(c Change) {
	if !slices.Contains(w.about.Causes, c.Cause) && (c.Cause != Overrun || len(w.about.Causes) == 0) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	overrun := Change{Cause: Overrun}
	if slices.Contains(w.pending, c) || slices.Contains(w.pending, overrun) {
		return
	}
	if w.pending = append(w.pending, c); c == overrun || len(w.pending) > mostChanges {
		w.pending = []Change{overrun}
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// leads reports whether a path still leads to a namespace. It returns true if the path cannot be
// examined at the moment.
func leads(path string, inode uint64) bool {
	there, err := Open(path)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNotNS) && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOTDIR)
	}
	defer there.Close()
	return there.Inode() == inode
}

// space is a watched namespace.
type space struct {
	ns   *NS
	bufs *sync.Pool // the Monitor's

	mu      sync.Mutex
	watches map[*watch]bool
	sockets map[feed]*socket
	devices listing
	known   reaches // while neighbours are watched
	qdiscs  qdiscs
}

// socket receives a feed.
type socket struct {
	f    *os.File
	conn syscall.RawConn
}

// begin adds a watch. The caller must call end even after an error.
func (s *space) begin(w *watch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches[w] = true
	for from := range w.feeds() {
		if s.sockets[from] != nil {
			continue
		}
		k, err := s.listen(from)
		if feeds[from].family != unix.NETLINK_ROUTE && errors.Is(err, unix.EPROTONOSUPPORT) {
			continue // the kernel lacks this subsystem, so nothing can change
		}
		if err != nil {
			return err
		}
		s.sockets[from] = k
		go s.follow(k, from)
		switch from { // after the socket, so that no change is missed
		case near:
			if err := s.known.read(s.ns); err != nil {
				return err
			}
		case routes:
			s.narrow()
		}
	}
	return nil
}

// feeds returns the feeds that a watch needs. Every watch keeps the list of devices up to date.
func (w *watch) feeds() map[feed]bool {
	used := map[feed]bool{devices: true}
	for _, c := range w.about.Causes {
		used[feedOf[c]] = true
	}
	return used
}

// end removes a watch, and closes what only that watch used.
func (s *space) end(w *watch) error {
	s.mu.Lock()
	delete(s.watches, w)
	used := make(map[feed]bool)
	for o := range s.watches {
		maps.Copy(used, o.feeds())
	}
	var unused []*socket
	for from, k := range s.sockets {
		if !used[from] {
			delete(s.sockets, from)
			unused = append(unused, k)
		}
	}
	if !used[near] {
		s.known = reaches{}
	}
	if !used[tc] {
		s.qdiscs = nil
	}
	last := len(s.watches) == 0
	s.mu.Unlock()
	var errs []error
	for _, k := range unused { // without the lock: Close waits for follow, which takes it
		errs = append(errs, k.f.Close())
	}
	if last {
		errs = append(errs, s.ns.Close())
	}
	return errors.Join(errs...)
}

// listen opens the socket of a feed.
func (s *space) listen(from feed) (*socket, error) {
	var fd int
	err := s.ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, feeds[from].family)
		return err
	})
	if err != nil {
		return nil, err
	}
	k := &socket{f: os.NewFile(uintptr(fd), "netlink")}
	join := func(group int) error {
		return unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, watchBuffer)
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, group := range feeds[from].groups {
		err = errors.Join(err, join(group))
	}
	if optional := feeds[from].optional; optional != 0 {
		_ = join(optional)
	}
	var cerr error
	k.conn, cerr = k.f.SyscallConn()
	if err = errors.Join(err, cerr); err != nil {
		return nil, errors.Join(err, k.f.Close())
	}
	return k, nil
}

// follow reads the messages of a socket until it is closed.
func (s *space) follow(k *socket, from feed) {
	for k.conn.Read(func(fd uintptr) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.sockets[from] != k || s.drain(int(fd), from)
	}) == nil {
		time.Sleep(watchPause)
	}
}

// drain handles all pending messages of the kernel, and reports whether there were any. Any process
// with CAP_NET_ADMIN in the namespace can send other messages here. s.mu is held.
func (s *space) drain(fd int, from feed) (any bool) {
	buf := s.bufs.Get().(*[readSize]byte)
	defer s.bufs.Put(buf)
	lost, more := false, true
	for reads := 0; more && reads < maxDrain; reads++ {
		n, sender, err := unix.Recvfrom(fd, buf[:], 0)
		if err != nil {
			more = !errors.Is(err, unix.EAGAIN)
			lost = lost || more // ENOBUFS
			continue
		}
		if kernel, ok := sender.(*unix.SockaddrNetlink); !ok || kernel.Pid != 0 {
			continue
		}
		list, err := syscall.ParseNetlinkMessage(buf[:n])
		lost = lost || err != nil
		for _, m := range list { // hear copies what it keeps
			any = true
			switch {
			case len(m.Data) < 8:
				lost = true
			case from == nft:
				s.tell(NFTChanged, 0)
			case from == xfrm:
				s.tell(PolicyChanged, 0)
			default:
				s.hear(m)
			}
		}
	}
	if lost = lost || more; lost {
		switch from {
		case devices:
			s.devices = listing{}
			s.narrow()
		case near:
			s.known.lost(s.ns)
		}
		s.tell(Overrun, 0)
	}
	return any || lost
}

func (s *space) tell(cause Cause, device int) {
	for w := range s.watches {
		w.tell(Change{cause, device})
	}
}

// list lists the devices; ns is another handle of the namespace.
func (s *space) list(ns *NS, most int) (links []Link, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.sockets[devices]
	if k == nil || k.conn.Control(func(fd uintptr) { s.drain(int(fd), devices) }) != nil {
		return ns.Links(most) // the last watch has just ended
	}
	return s.devices.all(ns, most)
}
