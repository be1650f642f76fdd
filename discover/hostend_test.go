package discover

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestManyDevices has a container make more devices than are looked at. The one for its packets is
// found all the same, though it is the last.
func TestManyDevices(t *testing.T) {
	testkit.InFull(t)
	const most = 2 * maxInterfaces
	for _, n := range []int{maxInterfaces + 1, most + 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ns, host := testkit.NetNS(t), testkit.NetNS(t)
			path := host.Bind(t)
			h := ns.Handle(t)
			for i := range n {
				must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("flbr", i)}}))
			}
			testkit.Veth(t, ns, "fl0", host, "flh0")
			cmd := sleeper(t, ns, testkit.Cgroup(t))
			src := newFake("docker")
			s := runSet(t, Config{Links: most}, src)
			src.report(Record{PID: cmd.Process.Pid, Name: "one"})
			c := awaitName(t, s, "one")
			if !c.Many || len(c.Interfaces) != maxInterfaces {
				t.Errorf("%d devices, many %v", len(c.Interfaces), c.Many)
			}
			if first := c.Interfaces[0]; first.Name != "fl0" || first.Host.NetNS != host.Inode || first.Host.NSPath != path {
				t.Errorf("first %+v", first)
			}
		})
	}
}

// TestHiddenHostEnds has the other ends of a container's devices in namespaces that nothing leads
// to. All that there is is tried, but once for all of them.
func TestHiddenHostEnds(t *testing.T) {
	testkit.InFull(t)
	ns := testkit.NetNS(t)
	const devices = 8
	for i := range devices {
		// Its path is a descriptor of this process, which is not looked at.
		testkit.Veth(t, ns, fmt.Sprint("fl", i), testkit.NetNS(t), "flh0")
	}
	cmd := sleeper(t, ns, testkit.Cgroup(t))
	asked, now := 0, time.Now()
	nets, err := newNetworks(Config{Proc: "/proc", NetNS: "/proc/self/ns/net", Links: 100, Now: func() time.Time { asked++; return now }}, func() {})
	must(t, err)
	defer nets.close()
	net, err := nets.of(ns.Inode, cmd.Process.Pid, true)
	if err != nil || len(net.interfaces) != devices || !net.missed {
		t.Fatalf("%+v, %v", net, err)
	}
	// One look at the container's namespace, one at all others: each has its time.
	testkit.Same(t, "questions for the time", 2, asked)
	if len(net.search.tried) < 2 || !net.search.tried[nets.own.Inode()] {
		t.Errorf("tried %v as process %d", net.search.tried, os.Getpid())
	}
	// A container that comes in the same second may lead to a namespace that comes with it, and has the
	// number of one that has gone.
	young, host := testkit.NetNS(t), testkit.NetNS(t)
	nets.hosts[host.Inode] = []string{ns.Path}
	sleeper(t, host, testkit.Cgroup(t))
	testkit.Veth(t, young, "fl0", host, "flh0")
	net, err = nets.of(young.Inode, sleeper(t, young, testkit.Cgroup(t)).Process.Pid, true)
	if err != nil || net.missed || net.interfaces[0].Host.NetNS != host.Inode {
		t.Errorf("%+v, %v", net, err)
	}
}
