package overlay

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// endpoint joins a container as Calico does: its host end is in no bridge, has the MAC address of all
// host ends and the route to the container, and answers for the gateway, which is returned.
func (r *rig) endpoint(n *node, b *sandbox.Box, hostEnd, addr string) (gateway string) {
	r.T.Helper()
	r.Wire(sandbox.End{Box: n.inside, Name: hostEnd, MAC: "ee:ee:ee:ee:ee:ee"},
		sandbox.End{Box: b, Name: "eth0", Addr: netip.MustParsePrefix(addr + "/32")})
	r.Route(n.inside, "0.0.0.0/0", "10.66.0.254") // else nothing answers for the gateway
	must(r.T, n.inside.Sysctl("ipv4/conf/"+hostEnd+"/proxy_arp", "1"))
	must(r.T, n.inside.Sysctl("ipv4/neigh/"+hostEnd+"/proxy_delay", "0"))
	n.run(r.T, "ip", "route", "add", addr, "dev", hostEnd)
	run(r.T, b, "ip", "route", "add", "169.254.1.1", "dev", "eth0")
	return "169.254.1.1"
}

// forbids returns the rules that felix v3.28.5 makes on the node of a container to which no policy
// allows anything, with one chain instead of one per direction. They accept established connections,
// and the kernel reports none of the rules.
func forbids(at int) denial {
	const rules = `*filter
:cali-FORWARD -
:cali-wl-dispatch -
:cali-w-veth0 -
:cali-po-deny -
-A FORWARD -j cali-FORWARD
-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
-A FORWARD -j MARK --set-mark 0x10000/0x10000
-A cali-FORWARD -j MARK --set-mark 0/0xe0000
-A cali-FORWARD -i veth+ -j cali-wl-dispatch
-A cali-FORWARD -o veth+ -j cali-wl-dispatch
-A cali-wl-dispatch -g cali-w-veth0
-A cali-w-veth0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-w-veth0 -m conntrack --ctstate INVALID -j DROP
-A cali-w-veth0 -j MARK --set-mark 0/0x30000
-A cali-w-veth0 -m mark --mark 0/0x20000 -j cali-po-deny
-A cali-w-veth0 -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-w-veth0 -m mark --mark 0/0x20000 -j DROP
COMMIT
`
	return denial{at: at,
		do: func(r *rig, n *node) { n.run(r.T, "sh", "-c", `echo "$0" | iptables-legacy-restore -w`, rules) },
		then: func(r *rig, n *node) {
			must(r.T, n.inside.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
		},
		undo: func(r *rig, n *node) { n.run(r.T, "sh", "-c", "iptables-legacy -w -F && iptables-legacy -w -X") }}
}

// Calico's endpoints are fast over its VXLAN, and its policy denies flows as without the fast path.
func TestCalico(t *testing.T) {
	t.Parallel()
	r := makeRig(&rig{Host: topology.New(t), form: routed, calico: true})
	r.onTracked()
	to := echo(t, r.nodes[1].web)
	r.fast(dial(t, r.nodes[0].web, "tcp", r.nodes[1].addr), 60000)
	for at := range r.nodes {
		r.denied(forbids(at), to)
	}
}

// Flows are fast that a mesh redirects in the pod, as Istio ambient does.
func TestMesh(t *testing.T) {
	r := newRig(t, routed)
	r.onTracked()
	to := r.nodes[1]
	run(t, to.web, "nft", "table inet fl_mesh { chain p { type nat hook prerouting priority -100; meta l4proto { tcp, udp } th dport 80 redirect to :9001; }; }")
	echo(t, to.web)
	for _, proto := range []string{"udp", "tcp"} {
		r.fast(dialAt(t, r.nodes[0].web, proto, to.addr+":80"), 1200)
	}
}
