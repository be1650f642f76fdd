package netdev

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func open(t *testing.T, path string) *NS {
	t.Helper()
	ns := testkit.Opened(Open(path))(t)
	return ns
}

// The wait for a lost answer ends.
func TestPatience(t *testing.T) {
	ns := open(t, testkit.NetNS(t).Path)
	err := ns.with(func(h *netlink.Handle) error {
		socket := reflect.ValueOf(h).Elem().FieldByName("sockets").MapIndex(reflect.ValueOf(unix.NETLINK_ROUTE)).Elem().FieldByName("Socket").Elem()
		for _, field := range []string{"sendTimeout", "receiveTimeout"} {
			testkit.Same(t, field+" of the socket", Patience, time.Duration(socket.FieldByName(field).Int()))
		}
		return nil
	})
	must(t, err)
}

func TestOpenRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "stray")
	must(t, os.WriteFile(file, nil, 0o644))
	fifo := filepath.Join(t.TempDir(), "fifo") // opening it would never end
	must(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{file, fifo, "/proc/self/ns/mnt", "/proc/self/exe", "/dev/null", t.TempDir()} {
		if ns, err := Open(path); err == nil {
			ns.Close()
			t.Errorf("Open(%s): no error", path)
		}
	}
	testkit.Is(t, "absent path", testkit.Err(Open("/proc/self/ns/nothing")), fs.ErrNotExist)
}

// TestDo enters namespaces from many goroutines at once, with functions that fail, leave and panic
// among them, and then checks that no thread of the process is in the wrong namespace.
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
	must(t, err)
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(tasks) == 0 {
		t.Fatal("no threads", err)
	}
	for _, task := range tasks {
		if ino, err := linkInode(task); err == nil && ino != home {
			t.Errorf("%s is in netns %d, want %d", task, ino, home)
		}
	}
}

func TestLinks(t *testing.T) {
	testkit.OnKernels(t)
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "fla0", b, "flb0")
	b.Port(t, "flb0", "flbr")
	a.Address(t, "fla0", "192.0.2.7/24")
	ha := a.Handle(t)
	inner, err := ha.LinkByName("fla0")
	must(t, err)
	must(t, ha.LinkAdd(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "flmv", ParentIndex: inner.Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE}))

	na, nb := open(t, a.Path), open(t, b.Path)
	byName := func(ns *NS) map[string]Link {
		links, err := ns.Links(MostLinks)
		must(t, err)
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
	testkit.Gives(t, "id of a stranger", -1)(na.ID(stranger))
	one, err := nb.Link(in.Peer)
	if err != nil || one.Name != "flb0" || one.Master != out.Master {
		t.Errorf("Link: %+v, %v", one, err)
	}
	testkit.Is(t, "absent link", testkit.Err(nb.Link(99999)), ErrNoLink)
	twin, err := nb.dup()
	if err != nil || twin.Inode() != nb.Inode() {
		t.Fatalf("Dup: %v, %v", twin, err)
	}
	if again, err := twin.Link(in.Peer); err != nil || again.Name != one.Name {
		t.Errorf("Link of the duplicate: %+v, %v", again, err)
	}
	testkit.Check(t, twin.Close())
	testkit.Is(t, "after the duplicate is closed", testkit.Err(nb.Link(in.Peer)), nil)
}

func TestFind(t *testing.T) {
	bound, lived := testkit.NetNS(t), testkit.NetNS(t)
	want := bound.Bind(t)
	testkit.Gives(t, "bound", want)(NewFinder("/proc", time.Now).Find(bound.Inode))
	cmd := lived.Start(t, "sleep", "100")
	want = filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "ns", "net")
	testkit.Gives(t, "lived in", want)(NewFinder("/proc", time.Now).Find(lived.Inode))
	testkit.Gives(t, "InodeOf", lived.Inode)(InodeOf("/proc", cmd.Process.Pid))
	testkit.Is(t, "nowhere", testkit.Err(NewFinder("/proc", time.Now).Find(1)), ErrNoNS)
	testkit.Is(t, "no proc", testkit.Err(NewFinder(filepath.Join(t.TempDir(), "proc"), time.Now).Find(1)), fs.ErrNotExist)
	testkit.Is(t, "absent process", testkit.Err(InodeOf("/proc", 1<<30)), fs.ErrNotExist)
}

// TestFinderOpen has paths that lead nowhere now, or to another namespace.
func TestFinderOpen(t *testing.T) {
	one, other := testkit.NetNS(t), testkit.NetNS(t)
	never := func() time.Time { return time.Time{} } // found paths never age
	find := NewFinder("/proc", never)
	cmd := one.Start(t, "sleep", "100")
	for _, path := range []string{"", other.Path, filepath.Join(t.TempDir(), "none")} {
		ns, err := find.Open(path, one.Inode)
		if err != nil {
			t.Fatalf("by %q: %v", path, err)
		}
		testkit.Same(t, "by "+path+": netns", one.Inode, ns.Inode())
		ns.Close()
	}
	cmd.Process.Kill()
	cmd.Wait()

	bound := other.Bind(t)
	// The path in another mount namespace has been unmounted since, or leads to another namespace
	// now.
	for _, script := range []string{
		"umount a",
		"umount a; mount --bind OTHER a",
	} {
		gone, dir := testkit.NetNS(t), t.TempDir()
		find := NewFinder("/proc", never)
		pid := elsewhere(t, fmt.Sprintf("mount -t tmpfs tmpfs %s; cd %[1]s; touch a; mount --bind %s a", dir, gone.Path))
		must(t, testkit.Err(find.Find(gone.Inode)))
		if out, err := exec.Command("nsenter", "-m", "-t", pid, "sh", "-c", "cd "+dir+"; "+strings.ReplaceAll(script, "OTHER", bound)).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
		testkit.Is(t, "after "+script, testkit.Err(find.Open("", gone.Inode)), ErrNoNS)
	}
}

// elsewhere starts a process in a mount namespace of its own, in which it first runs the script,
// and returns its PID. A script that fails at any step fails the test.
func elsewhere(t *testing.T, script string) string {
	t.Helper()
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec", script+"\necho ready\nexec sleep 1000")
	out, err := cmd.StdoutPipe()
	must(t, err)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	must(t, cmd.Start())
	// The pipe closes when the process ends, so this does not wait for one that failed.
	said, _ := bufio.NewReader(out).ReadString('\n')
	if said != "ready\n" {
		err := cmd.Wait()
		t.Fatalf("said %q, not that it is ready: %v: %s", said, err, complaint.Bytes())
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return strconv.Itoa(cmd.Process.Pid)
}

// TestFindElsewhere has namespaces that only another mount namespace leads to, of a process which
// puts things in the way.
func TestFindElsewhere(t *testing.T) {
	plain, hidden, trap := testkit.NetNS(t), testkit.NetNS(t), testkit.NetNS(t)
	bound, dir := trap.Bind(t), filepath.Join(t.TempDir(), "1") // dir/root looks like a process's root
	must(t, os.Mkdir(dir, 0o755))
	pid := elsewhere(t, fmt.Sprintf(`mount -t tmpfs tmpfs %s
cd %[1]s
mkdir -p "run/a b" over
touch "run/a b/ns" over/ns
mount --bind %s "run/a b/ns"
mount --bind %s over/ns
mount -t tmpfs tmpfs over
touch over/ns
ln -s / root
ln -s %s link
ln -s /proc/self/ns/net magic
mkfifo fifo
stat fifo link magic root >/dev/null`, dir, plain.Path, hidden.Path, bound))
	path, err := NewFinder("/proc", time.Now).Find(plain.Inode)
	if err != nil || path != "/proc/"+pid+"/root"+dir+"/run/a b/ns" {
		t.Fatalf("found at %q, %v", path, err)
	}
	if ns := open(t, path); ns.Inode() != plain.Inode {
		t.Errorf("%s is netns %d, want %d", path, ns.Inode(), plain.Inode)
	}
	// The tables of others are read again after a second, not before.
	now := time.Now()
	f := NewFinder("/proc", func() time.Time { return now })
	testkit.Gives(t, "found at", path)(f.Find(plain.Inode))
	late := testkit.NetNS(t)
	elsewhere(t, fmt.Sprintf("mount -t tmpfs tmpfs %s\ncd %[1]s\ntouch ns\nmount --bind %s ns", dir, late.Path))
	testkit.Is(t, "found at", testkit.Err(f.Find(late.Inode)), ErrNoNS)
	now = now.Add(time.Second)
	testkit.Check(t, testkit.Err(f.Find(late.Inode)))
	// A process may be there for a moment only: the mount comes first, and it after that.
	guest := plain.Start(t, "sleep", "1000").Process.Pid
	testkit.Same(t, "where it is of all", []string{path, fmt.Sprintf("/proc/%d/ns/net", guest)}, All("/proc")[plain.Inode])
	// The process would like us to open each of these.
	for _, name := range []string{"over/ns", "link", "root" + bound, "magic", "fifo", "..", "nowhere", "../proc/self/ns/net"} {
		path := "/proc/" + pid + "/root" + dir + "/" + name
		if ns, err := Open(path); err == nil {
			t.Errorf("%s opens as netns %d", path, ns.Inode())
			ns.Close()
		}
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

// The rest of the process reads /proc/self, which describes the first thread: it always shows our
// own namespace.
func TestDoLeavesTheFirstThread(t *testing.T) {
	ns, err := Open(testkit.NetNS(t).Path)
	must(t, err)
	defer ns.Close()
	own, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	done := make(chan error)
	const workers = 16
	for range workers {
		go func() {
			for range 50 {
				if err := ns.Do(func() error { time.Sleep(100 * time.Microsecond); return nil }); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for left := workers; left > 0; {
		select {
		case err := <-done:
			testkit.Check(t, err)
			left--
		default:
			if now, err := os.Readlink("/proc/self/ns/net"); now != own {
				t.Fatalf("own namespace is %s (%v), was %s", now, err, own)
			}
		}
	}
}

// A panic inside a namespace comes to who has called Do, where it can be contained.
func TestPanicInNamespace(t *testing.T) {
	ns := open(t, testkit.NetNS(t).Path)
	defer func() {
		p, ok := recover().(*Panic)
		if !ok || p.Value != "inside" || !strings.Contains(string(p.Stack), "TestPanicInNamespace") {
			t.Errorf("Do panicked with %v", p)
		}
		if err := ns.Do(func() error { return nil }); err != nil { // nothing is left locked
			t.Errorf("Do after that: %v", err)
		}
	}()
	ns.Do(func() error { panic("inside") })
}
