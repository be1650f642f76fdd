// Package netdev reads network devices, and turns their knobs, in any network namespace of this
// host.
//
// It speaks rtnetlink and ethtool; queueing disciplines belong to package qdisc. It knows devices,
// not containers. Package container uses it to read, and the features use it to write.
package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Patience limits the wait for an answer of the kernel over netlink. The kernel works while the
// request is sent, for any time; but an answer that was lost, because the socket's buffer was full,
// never comes.
const Patience = 5 * time.Second

// NS is an open network namespace. While it is open the kernel keeps the namespace and its devices
// alive, so close it soon, or when the container ends. Its methods may be called from several
// goroutines.
type NS struct {
	f     *os.File
	inode uint64

	mu sync.Mutex
	h  *netlink.Handle // opened inside at the first use
}

// Open opens the network namespace at path (/proc/PID/ns/net, or a bind mount of one). Below
// /proc/PID/root, a process may have chosen everything, so no link there is followed.
func Open(path string) (*NS, error) {
	// A process that can write to a directory on the way may have put something else there: a FIFO,
	// or a device that must not even be opened. So examine the object before opening it, and open
	// the examined object.
	at, err := openPath(path)
	if err != nil {
		return nil, &os.PathError{Op: "open netns", Path: path, Err: err}
	}
	defer unix.Close(at)
	var fs unix.Statfs_t
	if err := uninterrupted(func() error { return unix.Fstatfs(at, &fs) }); err != nil || fs.Type != unix.NSFS_MAGIC {
		return nil, fmt.Errorf("open netns %s: %w", path, cmp.Or(err, errNotNS))
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", at))
	if err != nil {
		return nil, fmt.Errorf("open netns %s: %w", path, err)
	}
	kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	var st unix.Stat_t
	if err = cmp.Or(err, unix.Fstat(int(f.Fd()), &st)); err != nil || kind != unix.CLONE_NEWNET {
		f.Close()
		return nil, fmt.Errorf("open netns %s: %w", path, cmp.Or(err, errNotNS))
	}
	return &NS{f: f, inode: st.Ino}, nil
}

// New makes a new network namespace. It has no name anywhere, and lives as long as it is open.
func New() (ns *NS, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread must stay where it is. While it is locked here, the next goroutine
			// gets another one.
			defer runtime.UnlockOSThread()
			ns, err = New()
			return
		}
		// Never unlocked: the thread ends with the goroutine.
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			ns, err = Open("/proc/thread-self/ns/net")
		}
	}()
	<-done
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	return ns, nil
}

var errNotNS = errors.New("not a network namespace")

// openFile opens a file without the runtime's poller.
func openFile(path string, flags int) (fd int, err error) {
	err = uninterrupted(func() (err error) {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		return err
	})
	return fd, err
}

// openPath opens a path to examine it.
func openPath(path string) (fd int, err error) {
	at := throughRoot.FindStringSubmatch(path)
	if at == nil {
		return openFile(path, unix.O_PATH)
	}
	root, err := openFile(at[1], unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	// Use only what the kernel has cached; it has the path to any mount. A file system that the
	// process itself serves (FUSE) could make us wait for an answer. In busy directories this fails
	// now and then.
	for try := 0; ; try++ {
		fd, err = unix.Openat2(root, at[2], &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | resolveCached,
		})
		if err != unix.EAGAIN || try == 10 {
			return fd, err
		}
		time.Sleep(time.Millisecond)
	}
}

// resolveCached is RESOLVE_CACHED of linux/openat2.h (5.12).
const resolveCached = 0x20

// throughRoot matches a path into the mount namespace of a process. Only the first number counts:
// the process itself may have made what looks like another one below.
var throughRoot = regexp.MustCompile(`^(.*?/[0-9]+/root)(/.+)$`)

// Inode identifies the namespace among those that exist now. The number may be used again once the
// namespace has gone.
func (ns *NS) Inode() uint64 { return ns.inode }

// Close closes the namespace.
func (ns *NS) Close() error {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if ns.h != nil {
		ns.h.Close()
		ns.h = nil
	}
	return ns.f.Close()
}

// dup returns a second handle, which must be closed separately.
func (ns *NS) dup() (*NS, error) {
	fd, err := unix.FcntlInt(ns.f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate netns %d: %w", ns.inode, err)
	}
	return &NS{f: os.NewFile(uintptr(fd), ns.f.Name()), inode: ns.inode}, nil
}

// Do runs fn in the namespace and returns its error. It changes only the network namespace, not the
// mounts: sysfs and bpffs stay the caller's. fn has a locked thread to itself; goroutines that fn
// starts run outside. Do discards a thread that it cannot restore. A panic of fn becomes a panic of
// Do, with a *Panic.
func (ns *NS) Do(fn func() error) error {
	done := make(chan error, 1)
	var p *Panic
	go func() {
		err := errors.New("function left its goroutine")
		defer func() {
			p = moved(recover())
			done <- err
		}()
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// /proc/self describes the first thread, and must not show another namespace as our own
			// meanwhile. While that thread is locked here, the next goroutine gets another one.
			defer runtime.UnlockOSThread()
			err = ns.Do(fn)
			return
		}
		home, herr := openFile("/proc/thread-self/ns/net", unix.O_RDONLY)
		if herr != nil {
			runtime.UnlockOSThread()
			err = fmt.Errorf("enter netns %d: %w", ns.inode, herr)
			return
		}
		defer unix.Close(home)
		if serr := unix.Setns(int(ns.f.Fd()), unix.CLONE_NEWNET); serr != nil {
			runtime.UnlockOSThread()
			err = fmt.Errorf("enter netns %d: %w", ns.inode, serr)
			return
		}
		// Deferred, so that the thread also comes back when fn panics or leaves; without the unlock
		// the runtime ends the thread.
		defer func() {
			if unix.Setns(home, unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = fn()
	}()
	err := <-done
	if p != nil {
		panic(p)
	}
	return err
}

// ID returns the number of other in ns (as in IFLA_LINK_NETNSID), or -1 if it has none there.
func (ns *NS) ID(other *NS) (int, error) {
	var id int
	err := ns.with(func(h *netlink.Handle) (err error) {
		id, err = h.GetNetNsIdByFd(int(other.f.Fd()))
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("id of netns %d in netns %d: %w", other.inode, ns.inode, err)
	}
	return id, nil
}

// with runs fn with an rtnetlink socket that was opened inside ns. The socket belongs to ns
// wherever it is used, so fn itself runs outside, one call at a time.
func (ns *NS) with(fn func(*netlink.Handle) error) error {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if ns.h == nil {
		err := ns.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			if err := h.SetSocketTimeout(Patience); err != nil {
				h.Close()
				return err
			}
			ns.h = h
			return nil
		})
		if err != nil {
			return err
		}
	}
	return fn(ns.h)
}

// Panic is the value of a panic that was moved to another goroutine, with its original stack.
type Panic struct {
	Value any
	Stack []byte
}

// Error implements error, for the trace of a process that ends.
func (p *Panic) Error() string { return fmt.Sprintf("%v\n\n%s", p.Value, p.Stack) }

// moved wraps what recover returned; nil stays nil. A panic that was moved before keeps its stack.
func moved(value any) *Panic {
	if value == nil {
		return nil
	}
	if p, ok := value.(*Panic); ok {
		return p
	}
	return &Panic{value, debug.Stack()}
}
