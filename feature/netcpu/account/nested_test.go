package account

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// portVXLAN is one of the ports at which tunnels arrive.
const portVXLAN = 4789

// A container sends over the loopback of a namespace that it has made and that fairlead does not know.
// The container is charged for all of it, on any CPU and for any kind of packet, and others for
// nothing.
func TestNested(t *testing.T) {
	testkit.InFull(t)
	f := newFabric(t, exactMeter(t))
	boxes := map[string]*sandbox.Box{"bad": f.add("bad", 2), "victim": f.add("victim", 3)}
	bad, victim := boxes["bad"], boxes["victim"]
	r := f.receive(victim, 1, ":9000")
	for i, c := range []struct {
		name  string
		rps   string // of the loopback there; the sender is on CPU 0
		port  int
		burns string // container that computes on CPU 1
		below bool   // the sender is in a cgroup that the container has made and that is not registered
	}{
		{"in the sender's own time", "", 9000, "", false},
		{"from a cgroup below its own", "", 9000, "", true},
		{"in its own time on another CPU", "2", 9000, "bad", false},
		{"in another's time", "2", 9000, "victim", false},
		{"as a tunnel's", "2", portVXLAN, "victim", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.begin(t)
			if c.burns != "" {
				_, burns := f.Load(boxes[c.burns], []int{1}, "burn")
				defer burns.Kill()
			}
			below := ""
			if c.below {
				below = filepath.Join(bad.Cgroups()[0], "below")
				must(t, os.Mkdir(below, 0o755))
			}
			f.nest(bad, c.rps, below, "udp-send", "--to", fmt.Sprintf("127.0.0.1:%d", c.port), "--rate", "1000", "--size", fmt.Sprint(payload), "--count", fmt.Sprint(packets))
			f.send(f.wire, 1, packets, "udp-send", "10.66.0.3:9000")
			f.got(r, uint64(packets*(1+i)))
			f.expect(func(d delta) {
				// The port has no listener: its owner answers many packets by ICMP, which the
				// container also pays for.
				d.received(bad, UDP, packets, packets*sizeUDP4)
				d.received(victim, UDP, packets, packets*sizeUDP4)
				if e := d.of(victim).Receive[Encapsulated]; e != (Work{}) {
					d.t.Errorf("the victim is charged %+v for a tunnel", e)
				}
				if c.burns == "" && !c.below && d.of(bad).Own <= 0 { // on another CPU it is chance
					d.t.Error("nothing of it in its own time")
				}
			})
		})
	}
}

// nest starts a generator on CPU 0, in a box's cgroup or a child of it, and in a new network namespace.
// rps is the RPS mask of the loopback there, which takes privileges on the host. Without it there is
// also a new user namespace, which any user can create.
func (l *lab) nest(b *sandbox.Box, rps, below string, args ...string) {
	l.t.Helper()
	cmd, board, err := load.Command(args...)
	must(l.t, err)
	cmd.Args = slices.Concat([]string{"fairlead", nestedVerb, rps, below}, cmd.Args[1:])
	l.Start(b, []int{0}, cmd, board)
}

// The arguments by which this program is started again, outside of such a namespace and inside.
const (
	nestedVerb = "nested"
	insideVerb = "nested-inside"
)

// reexecNested is sandbox.Reexec for the processes of nest. args begin with the
// program, the verb, rps and below.
func reexecNested(args []string) (status int, ok bool) {
	if len(args) < 5 || !strings.HasPrefix(args[1], nestedVerb) {
		return 0, false
	}
	run := nestedOutside
	if args[1] == insideVerb {
		run = nestedInside
	}
	if err := run(args[2], args[3], args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}

// nestedOutside enters the cgroup and starts the program once more in its new namespaces.
func nestedOutside(rps, below string, args []string) error {
	if below != "" {
		if err := os.WriteFile(filepath.Join(below, "cgroup.procs"), []byte("0"), 0); err != nil {
			return err
		}
	}
	runtime.LockOSThread() // the child is killed when this thread ends
	cmd := exec.Command("/proc/self/exe", slices.Concat([]string{insideVerb, rps, below}, args)...)
	cmd.Args[0] = "fairlead"
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{os.NewFile(3, "board")}
	root := []syscall.SysProcIDMap{{Size: 1}}
	attr := &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNET, UidMappings: root, GidMappings: root}
	if rps != "" {
		attr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET}
	}
	cmd.SysProcAttr = attr
	return cmd.Run()
}

// nestedInside makes the namespace ready and becomes the generator.
func nestedInside(rps, _ string, args []string) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	if rps != "" {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
			return err
		}
		if err := os.WriteFile("/sys/class/net/lo/queues/rx-0/rps_cpus", []byte(rps), 0); err != nil {
			return err
		}
	}
	return unix.Exec("/proc/self/exe", append([]string{"fairlead"}, args...), os.Environ())
}
