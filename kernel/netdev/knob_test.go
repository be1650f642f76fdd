package netdev_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/mountinfo"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

var must = testkit.Must

// pair is a veth with its ends in two namespaces, like a container's.
type pair struct {
	host, inside *netdev.NS
	h0, eth0     int // indices
}

func newPair(t *testing.T) pair {
	t.Helper()
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	p := pair{host: openNS(t, a.Path), inside: openNS(t, b.Path)}
	testkit.Veth(t, a, "h0", b, "eth0")
	p.h0, p.eth0 = index(t, p.host, "h0"), index(t, p.inside, "eth0")
	return p
}

func index(t *testing.T, ns *netdev.NS, name string) int {
	t.Helper()
	links, err := ns.Links(netdev.MostLinks)
	must(t, err)
	for _, l := range links {
		if l.Name == name {
			return l.Index
		}
	}
	t.Fatalf("no link %s in %+v", name, links)
	return 0
}

func change(t *testing.T, ns *netdev.NS, index int, do func(netlink.Link) error) {
	t.Helper()
	must(t, ns.Do(func() error { return do(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}) }))
}

func openNS(t *testing.T, path string) *netdev.NS {
	t.Helper()
	ns := testkit.Opened(netdev.Open(path))(t)
	return ns
}

// Each knob of a veth is turned, and all are as they were after a restore.
func TestKnobsOfAVeth(t *testing.T) {
	testkit.OnKernels(t)
	p := newPair(t)
	j := testkit.Journal(t, journal.Open)
	zero, err := p.inside.RPS(p.eth0, 0).Read() // its width depends on the number of possible CPUs
	must(t, err)
	knobs := []struct {
		knob          journal.Knob
		before, after string
	}{
		{p.inside.Offload(p.eth0, netdev.GRO), netdev.Off, netdev.GRO.On()},
		{p.host.Offload(p.h0, netdev.TSO), netdev.TSO.On(), netdev.Off},
		{p.inside.Threaded(p.eth0), "0", "1"},
		{p.inside.RPS(p.eth0, 0), netdev.CPUMask(nil, zero), "1"},
		{p.inside.RFS(p.eth0, 0), "0", "32"},
		{p.inside.Defer(p.eth0, netdev.FlushTimeout), "0", "200000"},
		{p.inside.Defer(p.eth0, netdev.HardIRQs), "0", "1"},
	}
	opened := make(map[journal.Ref]journal.Knob)
	for _, c := range knobs {
		opened[c.knob.Ref()] = c.knob
		if got, err := c.knob.Read(); err != nil || got != c.before {
			t.Fatalf("%v before: %q, %v; want %q", c.knob.Ref(), got, err, c.before)
		}
		must(t, j.Turn(c.knob, c.after, journal.Owner{Feature: "test"}))
		if got, err := c.knob.Read(); err != nil || strings.TrimLeft(got, "0,") != strings.TrimLeft(c.after, "0,") {
			t.Fatalf("%v after: %q, %v; want %q", c.knob.Ref(), got, err, c.after)
		}
	}
	testkit.Check(t, testkit.Err(j.Restore(func(r journal.Ref) (journal.Knob, error) { return opened[r], nil }, nil)))
	for _, c := range knobs {
		if got, err := c.knob.Read(); err != nil || got != c.before {
			t.Errorf("%v restored: %q, %v; want %q", c.knob.Ref(), got, err, c.before)
		}
	}
	testkit.None(t, "journal", j.Entries())
}

func TestKnobOfADeviceThatWent(t *testing.T) {
	testkit.OnKernels(t)
	p := newPair(t)
	change(t, p.host, p.h0, netlink.LinkDel)
	for _, k := range []journal.Knob{
		p.inside.Offload(p.eth0, netdev.GRO), p.inside.Threaded(p.eth0), p.inside.RPS(p.eth0, 0),
	} {
		testkit.Is(t, "read "+k.Ref().Kind, testkit.Err(k.Read()), journal.ErrGone)
		if err := k.Write("1"); !errors.Is(err, journal.ErrGone) && k.Ref().Kind != "offload" {
			t.Errorf("write %s: %v, want ErrGone", k.Ref().Kind, err)
		}
	}
}

// A veth without polling has nothing to be threaded: an attempt is refused while it is up, and the
// device counts as gone when it is down, as on its way out.
func TestThreadedWithoutNAPI(t *testing.T) {
	testkit.OnKernels(t)
	p := newPair(t)
	err := p.inside.Threaded(p.eth0).Write("1")
	if err == nil {
		testkit.Skip(t, "kernel takes threaded for a device without napi")
	}
	if !errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, journal.ErrGone) {
		t.Errorf("up: %v, want EOPNOTSUPP", err)
	}
	change(t, p.inside, p.eth0, netlink.LinkSetDown)
	testkit.Is(t, "down", p.inside.Threaded(p.eth0).Write("1"), journal.ErrGone)
}

func TestOpenKnob(t *testing.T) {
	p := newPair(t)
	// A namespace that only this test's descriptor keeps alive cannot be found again, as after a
	// container's end.
	if _, err := netdev.OpenKnob(netdev.NewFinder("/proc", time.Now), p.inside.Threaded(p.eth0).Ref()); !errors.Is(err, journal.ErrGone) {
		t.Errorf("open knob in a namespace without a path: %v, want ErrGone", err)
	}
	for _, bad := range []string{"threaded ", "threaded 1/2", "threaded x/2/", "threaded 1/-2/", "offload 1/2/lro", "rps 1/2/-1", "rps 1/2/../../x", "defer 1/2/../threaded", "nonsense 1/2/"} {
		kind, object, _ := strings.Cut(bad, " ")
		if k, err := netdev.OpenKnob(netdev.NewFinder("/proc", time.Now), journal.Ref{Kind: kind, Object: object}); err == nil || errors.Is(err, journal.ErrGone) {
			t.Errorf("open %s: %v, %v; want an error that is not ErrGone", bad, k, err)
		}
	}
	self, err := netdev.InodeOf("/proc", os.Getpid())
	must(t, err)
	home := openNS(t, "/proc/self/ns/net")
	if home.Inode() != self {
		t.Fatalf("own netns: %d and %d", home.Inode(), self)
	}
	lo := home.RPS(1, 0)
	k, err := netdev.OpenKnob(netdev.NewFinder("/proc", time.Now), lo.Ref())
	must(t, err)
	want, err1 := lo.Read()
	got, err2 := k.Read()
	if got != want || err1 != nil || err2 != nil || k.Ref() != lo.Ref() {
		t.Errorf("opened again: %q %v %+v, want %q %v %+v", got, err2, k.Ref(), want, err1, lo.Ref())
	}
}

// An IFB, and a pair that joins two namespaces, are made and removed; a foreign device of their name
// is neither.
func TestMade(t *testing.T) {
	testkit.OnKernels(t)
	ns, to := openNS(t, testkit.NetNS(t).Path), openNS(t, testkit.NetNS(t).Path)
	for _, c := range []struct {
		knob, again journal.Knob // the same after a restart
		ours, name  string
		ends        func() (map[*netdev.NS]int, error) // the devices
	}{
		{ns.IFB(7, false), ns.IFB(7, false), netdev.OurIFB, netdev.IFBName(7, false), func() (map[*netdev.NS]int, error) {
			index, err := ns.Index(netdev.IFBName(7, false))
			return map[*netdev.NS]int{ns: index}, err
		}},
		{ns.Pair(7, to), ns.Pair(7, nil), netdev.OurPair, "flov7", func() (map[*netdev.NS]int, error) {
			inner, outer, err := ns.PairEnds(7)
			return map[*netdev.NS]int{ns: inner, to: outer}, err
		}},
	} {
		expect := func(want string) {
			t.Helper()
			if got, err := c.knob.Read(); err != nil || got != want {
				t.Fatalf("%s: %q, %v, want %q", c.name, got, err, want)
			}
		}
		expect(netdev.NoDevice)
		for range 2 {
			must(t, c.knob.Write(c.ours))
			expect(c.ours)
		}
		ends, err := c.ends()
		must(t, err)
		for at, index := range ends {
			if l, err := at.Link(index); err != nil || !l.Up {
				t.Errorf("%s: %+v, %v", c.name, l, err)
			}
		}
		for range 2 {
			must(t, c.again.Write(netdev.NoDevice))
			expect(netdev.NoDevice)
		}
		testkit.Is(t, c.name+" has gone", testkit.Err(c.ends()), netdev.ErrNoLink)
		for at, index := range ends {
			if _, err := at.Link(index); !errors.Is(err, netdev.ErrNoLink) {
				t.Errorf("%s has gone, and %d is there: %v", c.name, index, err)
			}
		}
		theirs := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: c.name}}
		must(t, ns.Do(func() error { return netlink.LinkAdd(theirs) }))
		was, err := c.knob.Read()
		if err != nil || !strings.HasPrefix(was, "somebody's bridge") {
			t.Fatalf("%q, %v", was, err)
		}
		for _, v := range []string{c.ours, netdev.NoDevice} {
			testkit.Fails(t, v+" was written over somebody's", c.knob.Write(v))
		}
		expect(was)
	}
}

// A runtime has made the namespace's sysfs read-only. Readers and writers, and several writers,
// must not get in each other's way.
func TestReadOnlySysfs(t *testing.T) {
	testkit.InFull(t)
	ns, eth0, readOnly := readOnlySysfs(t)
	j := testkit.Journal(t, journal.Open)
	rounds := testkit.Scale(t, 20, 100)
	writing := make(chan struct{})
	var readers, writers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-writing:
					return
				default:
				}
				testkit.Check(t, testkit.Err(ns.Threaded(eth0).Read()))
			}
		})
	}
	for i, k := range []journal.Knob{ns.Threaded(eth0), ns.RPS(eth0, 0)} {
		writers.Go(func() {
			was, err := k.Read()
			if err != nil {
				t.Error(err)
				return
			}
			other := []string{"1", strings.TrimSuffix(was, "0") + "1"}[i]
			for range rounds {
				for _, v := range []string{other, was} {
					if err := j.Turn(k, v, journal.Owner{Feature: "test"}); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	writers.Wait()
	close(writing)
	readers.Wait()
	if !readOnly() {
		t.Error("the container's sysfs can be written to now")
	}
}

// readOnlySysfs returns a namespace with a device that can poll in threads and a sysfs that a
// runtime has made read-only, and a function that reports whether it still is.
func readOnlySysfs(t *testing.T) (ns *netdev.NS, eth0 int, readOnly func() bool) {
	t.Helper()
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	ns = openNS(t, b.Path)
	testkit.Veth(t, a, "h0", b, "eth0")
	eth0 = index(t, ns, "eth0")
	testkit.Must(t, ns.Offload(eth0, netdev.GRO).Write(netdev.GRO.On()))
	// In a mount namespace of its own, as a container's.
	runtime := b.Start(t, "unshare", "--mount", "--propagation", "private", "sh", "-ec", "mount -t sysfs -o ro sysfs /sys; exec sleep 1000")
	readOnly = func() bool {
		ro := false
		mountinfo.Read("/proc", fmt.Sprint(runtime.Process.Pid), func(m mountinfo.Mount) bool {
			if m.Dir == "/sys" && m.Type == "sysfs" {
				ro = strings.HasPrefix(m.Super, "ro")
			}
			return true
		})
		return ro
	}
	testkit.Await(t, "sysfs is read-only", readOnly)
	return ns, eth0, readOnly
}

// dying is a knob whose process is killed in the middle of a write.
type dying struct{ journal.Exposing }

var errKilled = errors.New("killed")

func (d dying) Write(string) error {
	ref, _, _, err := d.Exposes()
	if err == nil {
		var super journal.Knob
		super, err = netdev.OpenKnob(netdev.NewGlance("/proc", nil), ref)
		if err == nil {
			defer super.(io.Closer).Close()
			err = super.Write("rw")
		}
	}
	panic(errors.Join(errKilled, err))
}

// A write that a kill interrupts leaves a container's sysfs writable, and an entry by which the
// next agent makes it read-only again.
func TestSysfsInterrupted(t *testing.T) {
	testkit.OnKernels(t)
	ns, eth0, readOnly := readOnlySysfs(t)
	dir := t.TempDir()
	j, err := journal.Open(dir, "")
	must(t, err)
	func() {
		defer func() {
			if r := recover(); fmt.Sprint(r) != errKilled.Error() {
				t.Fatal(r)
			}
		}()
		j.Turn(dying{ns.Threaded(eth0).(journal.Exposing)}, "1", journal.Owner{Feature: "test"})
	}()
	if readOnly() {
		t.Fatal("the write did not begin")
	}
	j.Close()
	if j, err = journal.Open(dir, ""); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	lapsed := func(e journal.Entry) bool { return e.Expired(time.Now()) }
	out, err := j.Restore(kernelOpener(), lapsed)
	if err != nil || len(out) != 1 || out[0].Result != journal.Restored || !readOnly() {
		t.Errorf("an agent that starts makes of it %+v, %v; read-only %v", out, err, readOnly())
	}
	out, err = j.Restore(kernelOpener(), nil)
	if err != nil || len(out) != 1 || len(j.Entries()) != 0 {
		t.Errorf("the rest: %+v, %v; left %+v", out, err, j.Entries())
	}
}

func kernelOpener() journal.Opener {
	find := netdev.NewGlance("/proc", nil)
	return func(ref journal.Ref) (journal.Knob, error) { return netdev.OpenKnob(find, ref) }
}

// How a device receives: in softirq or in threads, and with or without XDP.
func TestHowADeviceReceives(t *testing.T) {
	testkit.OnKernels(t)
	p := newPair(t)
	want := func(when string, threads, xdp bool) {
		t.Helper()
		testkit.Gives(t, when+": polled by threads", threads)(p.inside.InThreads(p.eth0))
		testkit.Gives(t, when+": XDP", xdp)(p.inside.XDP(p.eth0))
	}
	want("new", false, false)
	must(t, errors.Join(p.inside.Offload(p.eth0, netdev.GRO).Write(netdev.GRO.On()), p.inside.Threaded(p.eth0).Write("1")))
	want("threaded", true, false)
	list, err := p.inside.NAPIs(p.eth0)
	if !errors.Is(err, netdev.ErrNoNAPIList) { // since 6.7
		must(t, err)
		if all, err := p.inside.NAPIs(0); err != nil || !slices.Equal(all, list) {
			t.Errorf("napi contexts of all devices: %+v, %v; want those of the only one, %+v", all, err, list)
		}
		if len(list) != 1 || list[0].Device != p.eth0 || list[0].ID == 0 || list[0].Thread == 0 {
			t.Errorf("napi contexts: %+v, want one with a thread", list)
		}
	}
	const pass = 2 // XDP_PASS
	program, err := testkit.Verdict(ebpf.XDP, "fl_test", pass)
	must(t, err)
	defer program.Close()
	var attached link.Link
	must(t, p.inside.Do(func() (err error) {
		attached, err = link.AttachXDP(link.XDPOptions{Interface: p.eth0, Program: program, Flags: link.XDPGenericMode})
		return err
	}))
	want("with XDP", true, true)
	must(t, attached.Close())
	want("without", true, false)
}
