package testkit

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// NS is a network namespace that a test made. It lives as long as its file descriptor, so it
// vanishes with the process even if that is killed; only [NS.Bind] leaves a name for it on the
// host.
type NS struct {
	// Path opens the namespace from this process and from its children. It is /proc/PID/fd/N, which
	// only the kernel can resolve. Use Bind where the namespace must be found in /run/netns.
	Path  string
	Inode uint64

	fd netns.NsHandle
}

// NetNS creates a network namespace with its loopback device up. It needs root and skips t without.
// The namespace is closed when t ends.
func NetNS(t testing.TB) *NS {
	t.Helper()
	NeedRoot(t)
	fd, err := newNetNS()
	Must(t, err)
	t.Cleanup(func() { fd.Close() })
	var st unix.Stat_t
	if err := unix.Fstat(int(fd), &st); err != nil {
		t.Fatalf("stat new netns: %v", err)
	}
	n := &NS{Path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), int(fd)), Inode: st.Ino, fd: fd}
	h := n.Handle(t)
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatalf("find lo: %v", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		t.Fatalf("set lo up: %v", err)
	}
	return n
}

func newNetNS() (netns.NsHandle, error) {
	fd := netns.None()
	err := away(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare netns: %w", err)
		}
		if fd, err = netns.Get(); err != nil {
			return fmt.Errorf("open new netns: %w", err)
		}
		return nil
	})
	return fd, err
}

// Do runs f on a thread that is inside the namespace. Sockets and children that f creates belong to
// the namespace; goroutines that it starts do not. f must not call t.FailNow, t.Fatal or Skip,
// since it does not run on the test's goroutine.
func (n *NS) Do(f func() error) error {
	return away(func() error {
		if err := netns.Set(n.fd); err != nil {
			return fmt.Errorf("enter netns %s: %w", n.Path, err)
		}
		return f()
	})
}

// away runs f on a separate thread, which may change its network namespace, and restores the thread
// afterwards. A thread that cannot be restored ends with its goroutine. away never uses the
// process's first thread: that thread cannot end, and /proc/self/ns refers to it.
func away(f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine holds the first thread, the next one gets
			// another.
			errc <- away(f)
			runtime.UnlockOSThread()
			return
		}
		home, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			errc <- fmt.Errorf("open own netns: %w", err)
			return
		}
		defer home.Close()
		err = f()
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
		errc <- err
	}()
	return <-errc
}

// Handle returns a netlink handle for the namespace, closed when t ends.
func (n *NS) Handle(t testing.TB) *netlink.Handle {
	t.Helper()
	var h *netlink.Handle
	err := n.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		t.Fatalf("netlink handle in %s: %v", n.Path, err)
	}
	t.Cleanup(h.Close)
	return h
}

// FD is the open namespace, for netlink.LinkSetNsFd and the like. It belongs
// to the NS.
func (n *NS) FD() int { return int(n.fd) }

// netnsNames is where ip-netns(8) keeps the names of namespaces.
const netnsNames = "/run/netns"

// Bind gives the namespace a name in /run/netns, as ip-netns(8) does, and
// returns the path. The name begins with "flt-" and is removed when t ends.
func (n *NS) Bind(t testing.TB) string {
	t.Helper()
	Must(t, os.MkdirAll(netnsNames, 0o755))
	f, err := os.CreateTemp(netnsNames, fmt.Sprintf("flt-%d-", os.Getpid()))
	Must(t, err)
	f.Close()
	path := f.Name()
	t.Cleanup(func() {
		// EINVAL: the bind below failed, and there is only the file.
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
			t.Errorf("unmount %s: %v", path, err)
		}
		if err := os.Remove(path); err != nil {
			t.Errorf("remove netns name: %v", err)
		}
	})
	if err := unix.Mount(n.Path, path, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("bind %s to %s: %v", n.Path, path, err)
	}
	return path
}

// Start runs a program inside the namespace and kills it when t ends.
func (n *NS) Start(t testing.TB, name string, arg ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, arg...)
	// The child inherits the namespace of the thread that forks it. Without a
	// parent-death signal, because that would fire when this thread ends.
	if err := n.Do(cmd.Start); err != nil {
		t.Fatalf("start %s: %v", filepath.Base(name), err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // an error means that it has ended already
		cmd.Wait()         // the test, not this function, checks its status
	})
	return cmd
}

// Veth joins two namespaces by a veth pair, with both ends up and without addresses. The pair
// vanishes with its namespaces.
func Veth(t testing.TB, a *NS, aName string, b *NS, bName string) {
	t.Helper()
	h := a.Handle(t)
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: aName},
		PeerName:      bName,
		PeerNamespace: netlink.NsFd(b.FD()),
	}
	if err := h.LinkAdd(veth); err != nil {
		t.Fatalf("add veth %s to %s: %v", aName, bName, err)
	}
	for _, end := range []struct {
		h    *netlink.Handle
		name string
	}{{h, aName}, {b.Handle(t), bName}} {
		link, err := end.h.LinkByName(end.name)
		if err != nil {
			t.Fatalf("find %s: %v", end.name, err)
		}
		if err := end.h.LinkSetUp(link); err != nil {
			t.Fatalf("set %s up: %v", end.name, err)
		}
	}
}

// Address adds an address, in CIDR notation, to a device of the namespace.
func (n *NS) Address(t testing.TB, dev, cidr string) {
	t.Helper()
	h := n.Handle(t)
	link, err := h.LinkByName(dev)
	if err != nil {
		t.Fatalf("find %s: %v", dev, err)
	}
	addr, err := netlink.ParseAddr(cidr)
	Must(t, err)
	if addr.IP.To4() == nil {
		addr.Flags = unix.IFA_F_NODAD
	}
	if err := h.AddrAdd(link, addr); err != nil {
		t.Fatalf("add %s to %s: %v", cidr, dev, err)
	}
}

// Port makes a device of the namespace a port of a bridge, and creates the bridge if there is none.
func (n *NS) Port(t testing.TB, dev, bridge string) {
	t.Helper()
	h := n.Handle(t)
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}
	if err := h.LinkAdd(br); err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatalf("add bridge %s: %v", bridge, err)
	}
	link, err := h.LinkByName(dev)
	if err != nil {
		t.Fatalf("find %s: %v", dev, err)
	}
	if err := h.LinkSetMaster(link, br); err != nil {
		t.Fatalf("make %s a port of %s: %v", dev, bridge, err)
	}
}
