package discover

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestElsewhere(t *testing.T) {
	const node, box = 10, 20
	inhabited := map[uint64]bool{box: true}
	for _, tc := range []struct {
		name  string
		leads []far
		want  bool
	}{
		{"no device leads out", nil, false},
		{"to a node", []far{{inode: node}}, true},
		{"to two", []far{{inode: node}, {inode: node + 1}}, true},
		{"to one that leads here", []far{{inode: node, home: true}}, false},
		{"to two, one of which leads here", []far{{inode: node}, {inode: node + 1, home: true}}, false},
		{"to one that leads nobody knows where", []far{{inode: node, doubt: true}}, false},
		{"to one that was not found", []far{{}}, false},
		{"to the outside", []far{{inode: node, home: true, doubt: true, outside: true}}, true},
		{"to the outside and to one that leads here", []far{{inode: node, home: true, outside: true}, {inode: node + 1, home: true}}, false},
		{"to a container", []far{{inode: box, home: true}}, true},
		{"to a container with a VPN", []far{{inode: box, home: true, doubt: true}}, true},
		{"to a container and to one that leads here", []far{{inode: box, home: true}, {inode: node, home: true}}, false},
	} {
		testkit.Same(t, tc.name, tc.want, elsewhere(tc.leads, inhabited))
	}
}

// TestOtherHost has cgroups of this host and of others, by where their devices lead.
func TestOtherHost(t *testing.T) {
	cg := testkit.Cgroup(t)
	host := testkit.NetNS(t)
	live := func(name string) *testkit.NS {
		t.Helper()
		ns := testkit.NetNS(t)
		sleeper(t, ns, cg.Child(t, name))
		return ns
	}
	// A namespace of foreign processes, in a cgroup that is not looked at.
	node := func() *testkit.NS {
		t.Helper()
		ns := testkit.NetNS(t)
		ns.Start(t, "sleep", "1000")
		return ns
	}
	port := 0
	join := func(a, b *testkit.NS) {
		t.Helper()
		port++
		testkit.Veth(t, a, fmt.Sprint("flb", port), b, fmt.Sprint("fla", port))
	}
	// Moves a device that was made in one namespace to another one, which it leads from.
	move := func(from *testkit.NS, l netlink.Link, to *testkit.NS) {
		t.Helper()
		h := from.Handle(t)
		must(t, h.LinkAdd(l))
		made, err := h.LinkByName(l.Attrs().Name)
		must(t, err)
		must(t, h.LinkSetNsFd(made, to.FD()))
	}
	bridged, macvlan, overlaid, rootless := live("bridged"), live("macvlan"), live("overlaid"), live("rootless")
	pod, second, inner := live("pod"), live("second"), live("inner")
	live("none")
	join(bridged, host)

	must(t, host.Handle(t).LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "flparent"}}))
	parent, err := host.Handle(t).LinkByName("flparent")
	must(t, err)
	move(host, &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "flmac", ParentIndex: parent.Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE}, macvlan)

	// As Docker does for an overlay: its bridge and its VXLAN have a namespace of their own.
	overlay := testkit.NetNS(t)
	overlay.Bind(t)
	move(host, &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flvxlan"}, VxlanId: 4711, Port: 4789}, overlay)
	join(overlaid, overlay)

	// As Podman does without root: a bridge that is reached by a TUN.
	user := node()
	err = user.Do(func() error {
		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "fltap"}, Mode: netlink.TUNTAP_MODE_TAP})
	})
	must(t, err)
	join(rootless, user)

	// A node beside this host, and an engine inside one of its containers.
	beside, underlay := node(), node()
	join(pod, beside)
	join(second, beside)
	join(beside, underlay)
	box := testkit.NetNS(t)
	outer := sleeper(t, box, cg.Child(t, "outer"))
	join(box, host)
	join(inner, box)

	// A node's own pod, in the host network, beside the underlay that this host's default route takes.
	outside, neighbour := node(), live("neighbour")
	join(host, outside)
	uplink, err := host.Handle(t).LinkByName(fmt.Sprint("flb", port))
	must(t, err)
	err = host.Handle(t).RouteAdd(&netlink.Route{LinkIndex: uplink.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Scope: netlink.SCOPE_LINK})
	must(t, err)
	join(neighbour, outside)

	docker := newFake("docker")
	s := runSet(t, Config{NetNS: host.Path, Refresh: 50 * time.Millisecond}, docker, CgroupTree("/proc", ""))
	listed := func(what string, want ...string) {
		t.Helper()
		await(t, s, what, func(snap Snapshot) bool {
			var got []string
			for _, c := range snap.Containers {
				if name, ok := strings.CutPrefix(c.Cgroup.V2, cg.V2+"/"); ok {
					got = append(got, filepath.Base(name))
				}
			}
			slices.Sort(got)
			return snap.Complete && slices.Equal(got, want)
		})
	}
	docker.report(Record{PID: outer.Process.Pid, Name: "outer"})
	listed("this host's", "bridged", "macvlan", "none", "outer", "overlaid", "rootless")
	join(beside, host)
	listed("those of a node that is joined to this host", "bridged", "macvlan", "none", "outer", "overlaid", "pod", "rootless", "second")
	docker.report()
	listed("what no runtime has a container around", "bridged", "inner", "macvlan", "none", "outer", "overlaid", "pod", "rootless", "second")
}
