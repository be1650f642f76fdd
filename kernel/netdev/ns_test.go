package netdev

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func open(t *testing.T, path string) *NS {
	t.Helper()
	ns, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func TestOpenRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "stray")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, "/proc/self/ns/mnt", "/proc/self/exe", "/dev/null", t.TempDir()} {
		if ns, err := Open(path); err == nil {
			ns.Close()
			t.Errorf("Open(%s): no error", path)
		}
	}
	if _, err := Open("/proc/self/ns/nothing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent path: got %v, want ErrNotExist", err)
	}
}

// TestDo goes into namespaces from many goroutines at once, with functions
// that fail, leave and panic among them, and looks whether any thread of the
// process is in the wrong namespace afterwards.
func TestDo(t *testing.T) {
	made := testkit.NetNS(t)
	ns := open(t, made.Path)
	if ns.Inode() != made.Inode {
		t.Fatalf("inode %d, want %d", ns.Inode(), made.Inode)
	}
	wrong := errors.New("wrong namespace")
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			err := ns.Do(func() error {
				target, err := os.Readlink("/proc/thread-self/ns/net")
				if ino, ok := parseNSLink(target); err != nil || !ok || ino != made.Inode {
					return wrong
				}
				switch i % 3 {
				case 0:
					return fs.ErrClosed
				case 1:
					runtime.Goexit()
				}
				return nil
			})
			switch {
			case errors.Is(err, wrong):
				t.Error(err)
			case i%3 == 0 && !errors.Is(err, fs.ErrClosed), i%3 == 1 && err == nil, i%3 == 2 && err != nil:
				t.Errorf("case %d: error %v", i%3, err)
			}
		})
	}
	wg.Wait()
	home, err := InodeOf("/proc", os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(tasks) == 0 {
		t.Fatal("no threads", err)
	}
	for _, task := range tasks {
		if ino, ok := linkInode(task); ok && ino != home {
			t.Errorf("%s is in netns %d, want %d", task, ino, home)
		}
	}
}

func TestLinks(t *testing.T) {
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "fla0", b, "flb0")
	h := b.Handle(t)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "flbr"}}
	if err := h.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	veth, err := h.LinkByName("flb0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.LinkSetMaster(veth, bridge); err != nil {
		t.Fatal(err)
	}
	ha := a.Handle(t)
	inner, err := ha.LinkByName("fla0")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr("192.0.2.7/24")
	if err != nil {
		t.Fatal(err)
	}
	if err := ha.AddrAdd(inner, addr); err != nil {
		t.Fatal(err)
	}
	if err := ha.LinkAdd(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "flmv", ParentIndex: inner.Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE}); err != nil {
		t.Fatal(err)
	}

	na, nb := open(t, a.Path), open(t, b.Path)
	byName := func(ns *NS) map[string]Link {
		links, err := ns.Links()
		if err != nil {
			t.Fatal(err)
		}
		m := make(map[string]Link)
		for _, l := range links {
			m[l.Name] = l
		}
		return m
	}
	la, lb := byName(na), byName(nb)
	in, out := la["fla0"], lb["flb0"]
	if in.Kind != "veth" || out.Kind != "veth" || lb["flbr"].Kind != "bridge" || la["flmv"].Kind != "macvlan" || la["lo"].Kind != "device" {
		t.Errorf("kinds: %+v %+v", la, lb)
	}
	if in.Peer != out.Index || out.Peer != in.Index {
		t.Errorf("peers: inner %+v, outer %+v", in, out)
	}
	if !slices.Contains(in.Addrs, "192.0.2.7/24") || in.MAC != inner.Attrs().HardwareAddr.String() || !in.Up {
		t.Errorf("inner end: %+v", in)
	}
	if out.Master != lb["flbr"].Index || in.Master != 0 {
		t.Errorf("master: inner %d, outer %d, want 0 and %d", in.Master, out.Master, lb["flbr"].Index)
	}
	if mv := la["flmv"]; mv.Peer != in.Index || mv.PeerNS != -1 {
		t.Errorf("macvlan: %+v", mv)
	}
	id, err := na.ID(nb)
	if err != nil || id < 0 || id != in.PeerNS {
		t.Errorf("id of b in a: %d, %v; the link says %d", id, err, in.PeerNS)
	}
	stranger := open(t, testkit.NetNS(t).Path)
	if id, err := na.ID(stranger); err != nil || id != -1 {
		t.Errorf("id of a stranger: %d, %v, want -1", id, err)
	}
	one, err := nb.Link(in.Peer)
	if err != nil || one.Name != "flb0" || one.Master != out.Master {
		t.Errorf("Link: %+v, %v", one, err)
	}
	if _, err := nb.Link(99999); !errors.Is(err, ErrNoLink) {
		t.Errorf("absent link: got %v, want ErrNoLink", err)
	}
}

func TestWatch(t *testing.T) {
	made := testkit.NetNS(t)
	ns := open(t, made.Path)
	events := make(chan struct{}, 1)
	stop, err := ns.Watch(func() {
		select {
		case events <- struct{}{}:
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	h := made.Handle(t)
	ifb := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flifb"}}
	if err := h.LinkAdd(ifb); err != nil {
		t.Fatal(err)
	}
	<-events // hangs, and so fails, if there is none
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestFind(t *testing.T) {
	bound, lived := testkit.NetNS(t), testkit.NetNS(t)
	want := bound.Bind(t)
	if got, err := Find("/proc", bound.Inode); err != nil || got != want {
		t.Errorf("bound: %q, %v, want %s", got, err, want)
	}
	cmd := lived.Start(t, "sleep", "100")
	want = filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "ns", "net")
	if got, err := Find("/proc", lived.Inode); err != nil || got != want {
		t.Errorf("lived in: %q, %v, want %s", got, err, want)
	}
	if ino, err := InodeOf("/proc", cmd.Process.Pid); err != nil || ino != lived.Inode {
		t.Errorf("InodeOf: %d, %v, want %d", ino, err, lived.Inode)
	}
	if got, err := Find("/proc", 1); !errors.Is(err, ErrNoNS) {
		t.Errorf("nowhere: %q, %v, want ErrNoNS", got, err)
	}
	if _, err := Find(filepath.Join(t.TempDir(), "proc"), 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no proc: %v, want ErrNotExist", err)
	}
	if _, err := InodeOf("/proc", 1<<30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent process: %v, want ErrNotExist", err)
	}
}

// TestNamedStray has what a container or a sloppy admin may leave in the
// directory: nothing of it may be taken for a namespace.
func TestNamedStray(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/proc/self/ns/mnt", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if ns, err := Open(filepath.Join(dir, "fifo")); err == nil {
		ns.Close()
		t.Error("a FIFO was opened")
	}
	for path := range Named(dir) {
		// A link to another kind of namespace passes for a name; opening refuses it.
		if ns, err := Open(path); err == nil {
			ns.Close()
			t.Errorf("%s was opened", path)
		}
		if filepath.Base(path) != "link" {
			t.Errorf("%s is named", path)
		}
	}
	if n := Named(filepath.Join(dir, "nowhere")); len(n) != 0 {
		t.Errorf("absent directory: %v", n)
	}
}

func FuzzNSLink(f *testing.F) {
	f.Add("net:[4026531840]")
	f.Add("net:[-1]")
	f.Add("mnt:[4026531840]")
	f.Fuzz(func(t *testing.T, s string) {
		if ino, ok := parseNSLink(s); ok {
			if again, ok := parseNSLink("net:[" + strconv.FormatUint(ino, 10) + "]"); !ok || again != ino {
				t.Errorf("%q gives %d, which gives %d", s, ino, again)
			}
		}
	})
}
