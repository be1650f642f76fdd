package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// Overlay is two hosts joined by a wire, with an overlay network (VXLAN) over it, and a container
// on each. The first host's processes are pinned to CPU 0, the second's to CPU 1.
type Overlay struct {
	Hosts [2]*Rig
	// Tunnels are the network namespaces with the tunnel devices. On the path Routed they are the
	// hosts' network namespaces, on the path Swarm nil.
	Tunnels [2]*sandbox.Box

	Addrs [2]string // addresses of the containers on the overlay network
}

// The names and addresses in an overlay. A host's device on the wire is NICDevice. The first host
// and its container have the first of each pair of addresses. A host's end of its container's veth
// is PortPrefix and the container's name.
const (
	// Client and Server are the names of the containers.
	Client = "client"
	Server = "server"

	// The path Routed is built like Flannel's network: each host has a separate network for containers
	// behind a bridge, which has the address of their gateway, and a route through the tunnel device
	// to the other host's network.
	RoutedTunnel = "flannel.1"
	routedVNI    = 1
	routedPort   = 8472
	gatewayPort  = "cni0"
	// The path Bridged is built like Docker Swarm's network: a separate network namespace has the
	// bridge and the tunnel device, which is one of its ports. All containers are in one network.
	BridgedTunnel = "vxlan0"
	bridgedVNI    = 4097
	bridgedPort   = 4789
	tunnelBridge  = "br0"
	tunnelNetNS   = "netns" // file in a TempDir: the namespace, mounted where an agent sees it

	// ServiceAddr is the address of a service with the second host's container as its backend, by
	// DNAT as from kube-proxy.
	ServiceAddr = "10.112.0.10"
)

// HostAddr is the address of a host on the wire.
func HostAddr(host int) string { return fmt.Sprintf("10.113.0.%d", 1+host) }

// subnet is the network of a host's containers on the path Routed.
func subnet(host int) string { return fmt.Sprintf("10.111.%d.0", host) }

// NewOverlay builds an overlay: Routed, Bridged or Swarm. It needs what New needs, and the program
// nft; for Swarm what New needs with the path Docker.
func NewOverlay(ctx context.Context, path Path) (_ *Overlay, err error) {
	if !slices.Contains([]Path{Routed, Bridged, Swarm}, path) {
		return nil, fmt.Errorf("build overlay: no such path: %q", path)
	}
	o := new(Overlay)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("build overlay: %w", err), o.Close())
		}
	}()
	for host, name := range []string{Client, Server} {
		c := Config{Path: path, Containers: []Container{{Name: name, CPU: host}}}
		if o.Hosts[host], err = newRig(ctx, c, host); err != nil {
			return nil, err
		}
	}
	if err := o.wire(); err != nil {
		return nil, err
	}
	if path == Swarm {
		return o, o.swarm(ctx)
	}
	join := o.bridged
	o.Addrs = [2]string{address(0), address(1)}
	if path == Routed {
		join = o.routed
		o.Addrs = [2]string{"10.111.0.2", "10.111.1.2"} // in two networks; see subnet
	}
	for host, r := range o.Hosts {
		o.Tunnels[host] = r.Node
		if err := join(host); err != nil {
			return nil, err
		}
		if err := errors.Join(manyPorts(r.Boxes[0]), r.feed(ctx, fmt.Sprintf(hostRules, "10.111.0.0/16", ServiceAddr, o.Addrs[1]), "nft", "-f", "-")); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// Close removes both hosts.
func (o *Overlay) Close() error {
	var errs []error
	for _, r := range o.Hosts {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	return errors.Join(errs...)
}

// wire joins the hosts.
func (o *Overlay) wire() error {
	end := func(host int) sandbox.End {
		return sandbox.End{Box: o.Hosts[host].Node, Name: NICDevice, Addr: prefix(HostAddr(host))}
	}
	if err := sandbox.Wire(end(0), end(1)); err != nil {
		return err
	}
	var errs []error
	for _, r := range o.Hosts {
		errs = append(errs, r.Node.Sysctl("ipv4/ip_forward", "1"), manyPorts(r.Node),
			r.Node.Sysctl("netfilter/nf_conntrack_tcp_timeout_time_wait", "5"))
	}
	return errors.Join(errs...)
}

// manyPorts lets short connections in rapid succession find a free port.
func manyPorts(b *sandbox.Box) error {
	return errors.Join(b.Sysctl("ipv4/tcp_tw_reuse", "1"), b.Sysctl("ipv4/ip_local_port_range", "10000 60000"))
}

// hostRules is the minimum on a host of containers: connection tracking of forwarded and local packets,
// source NAT for packets that leave the network %s, and a service of the second container.
const hostRules = `
table ip flhost {
	chain prerouting { type nat hook prerouting priority dstnat; ip daddr %[2]s dnat to %[3]s; }
	chain postrouting {
		type nat hook postrouting priority srcnat;
		ip saddr %[1]s ip daddr != %[1]s masquerade
	}
	chain output { type nat hook output priority -100; }
	chain input {
		type filter hook input priority filter;
		ct state invalid drop
		ct state established,related accept
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		ct state invalid drop
		ct state established,related accept
		ip saddr %[1]s accept
		ip daddr %[1]s accept
	}
}
`

// tunnelAs creates the tunnel device of a host.
func (o *Overlay) tunnelAs(host int, vx *netlink.Vxlan, end sandbox.End) error {
	r := o.Hosts[host]
	return r.Node.Change(NICDevice, func(_ *netlink.Handle, nic netlink.Link) error {
		vx.MTU, vx.VtepDevIndex, vx.SrcAddr = tunnelMTU, nic.Attrs().Index, net.ParseIP(HostAddr(host))
		return r.Node.Add(vx, end)
	})
}

// tunnelMAC returns the MAC address of a host's end of the tunnel on the path Routed.
func tunnelMAC(host int) string { return fmt.Sprintf("02:f1:00:02:00:%02x", host) }

// routed joins a host's container to the overlay network as Flannel does.
func (o *Overlay) routed(host int) error {
	r, other := o.Hosts[host], 1-host
	own := sandbox.End{Box: r.Node, Name: RoutedTunnel, Addr: netip.PrefixFrom(netip.MustParseAddr(subnet(host)), 32), MAC: tunnelMAC(host)}
	if err := o.tunnelAs(host, &netlink.Vxlan{VxlanId: routedVNI, Port: routedPort}, own); err != nil {
		return err
	}
	gateway := fmt.Sprintf("10.111.%d.1", host)
	if err := r.Node.Bridge(gatewayPort, prefix(gateway)); err != nil {
		return err
	}
	if err := r.join(r.Node, gatewayPort, o.Addrs[host], mac(host)); err != nil {
		return err
	}
	return errors.Join(
		r.Node.Neighbour(RoutedTunnel, netip.MustParseAddr(subnet(other)), tunnelMAC(other)),
		r.Node.Remote(RoutedTunnel, tunnelMAC(other), HostAddr(other)),
		r.Node.Change(RoutedTunnel, func(h *netlink.Handle, vx netlink.Link) error {
			return h.RouteAdd(&netlink.Route{
				LinkIndex: vx.Attrs().Index, Dst: &net.IPNet{IP: net.ParseIP(subnet(other)), Mask: net.CIDRMask(24, 32)},
				Gw: net.ParseIP(subnet(other)), Flags: int(netlink.FLAG_ONLINK),
			})
		}),
		r.Boxes[0].Change("eth0", func(h *netlink.Handle, dev netlink.Link) error {
			return h.RouteAdd(&netlink.Route{LinkIndex: dev.Attrs().Index, Gw: net.ParseIP(gateway)})
		}))
}

// bridged joins a host's container to the overlay network as Docker Swarm does.
func (o *Overlay) bridged(host int) error {
	r, other := o.Hosts[host], 1-host
	box, err := r.create(sandbox.Spec{Name: r.id + "-tunnel", Bare: true})
	if err != nil {
		return err
	}
	o.Tunnels[host] = box
	if err := r.mount(box.NetNS()); err != nil {
		return err
	}
	if err := box.Bridge(tunnelBridge, netip.Prefix{}); err != nil {
		return err
	}
	vx := &netlink.Vxlan{VxlanId: bridgedVNI, Port: bridgedPort, Learning: true, Proxy: true, L2miss: true, L3miss: true}
	if err := o.tunnelAs(host, vx, sandbox.End{Box: box, Name: BridgedTunnel, Bridge: tunnelBridge}); err != nil {
		return err
	}
	if err := r.join(box, tunnelBridge, o.Addrs[host], mac(host)); err != nil {
		return err
	}
	return errors.Join(
		box.Neighbour(BridgedTunnel, netip.MustParseAddr(o.Addrs[other]), mac(other)),
		box.Remote(BridgedTunnel, mac(other), HostAddr(other)))
}

// join connects the container to a bridge.
func (r *Rig) join(at *sandbox.Box, bridge, addr, mac string) error {
	port := PortPrefix + r.Containers[0].Name
	if err := sandbox.Wire(
		sandbox.End{Box: at, Name: port, Bridge: bridge},
		sandbox.End{Box: r.Boxes[0], Name: "eth0", Addr: prefix(addr), MAC: mac}); err != nil {
		return err
	}
	mtu := func(h *netlink.Handle, link netlink.Link) error { return h.LinkSetMTU(link, tunnelMTU) }
	return errors.Join(at.Change(port, mtu), at.Change(bridge, mtu), r.Boxes[0].Change("eth0", mtu))
}

// mount mounts a network namespace on a file, which shows an agent that no container created it.
func (r *Rig) mount(netns string) error {
	dir, err := r.TempDir("tunnel")
	if err != nil {
		return err
	}
	at := filepath.Join(dir, tunnelNetNS)
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		return err
	}
	if err := unix.Mount(netns, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount network namespace: %w", err)
	}
	return nil
}

// unmount undoes mount in a directory that TempDir made. It has no effect in any other directory.
func unmount(dir string) { unix.Unmount(filepath.Join(dir, tunnelNetNS), unix.MNT_DETACH) }

// The overlay network of the path Swarm.
const (
	swarmNetwork = "flover"
	swarmSubnet  = "10.216.0.0/24"
)

// swarm starts an engine on each host, joins them to a Swarm, and starts the containers in a new
// overlay network.
func (o *Overlay) swarm(ctx context.Context) error {
	for _, r := range o.Hosts {
		if err := r.startEngine(ctx); err != nil {
			return err
		}
	}
	first := o.Hosts[0].engine
	if _, err := first.run(ctx, nil, "swarm", "init", "--advertise-addr", HostAddr(0)); err != nil {
		return err
	}
	token, err := first.run(ctx, nil, "swarm", "join-token", "-q", "worker")
	if err != nil {
		return err
	}
	if err := o.Hosts[1].engine.join(ctx, token, HostAddr(1), HostAddr(0)); err != nil {
		return err
	}
	if _, err := first.run(ctx, nil, "network", "create", "-d", "overlay", "--attachable", "--subnet", swarmSubnet, swarmNetwork); err != nil {
		return err
	}
	for host, r := range o.Hosts {
		if err := r.contain(ctx, 0, "--network", swarmNetwork); err != nil {
			return err
		}
		if err := manyPorts(r.Boxes[0]); err != nil {
			return err
		}
		format := fmt.Sprintf("{{(index .NetworkSettings.Networks %q).IPAddress}}", swarmNetwork)
		if o.Addrs[host], err = r.engine.run(ctx, nil, "inspect", "--format", format, r.Boxes[0].Name); err != nil {
			return err
		}
		if err := r.showTunnel(); err != nil {
			return err
		}
	}
	return nil
}

// join makes the engine a worker of a Swarm. manager is the manager's address. docker swarm join may
// time out, and then continues in the background.
func (e *engine) join(ctx context.Context, token, own, manager string) error {
	_, joined := e.run(ctx, nil, "swarm", "join", "--token", token, "--advertise-addr", own, manager+":2377")
	for end := time.Now().Add(time.Minute); ; {
		state, err := e.run(ctx, nil, "info", "--format", "{{.Swarm.LocalNodeState}}")
		if err == nil && state == "active" {
			return nil
		}
		if time.Now().After(end) || state != "pending" {
			return fmt.Errorf("it is %q: %w, %w", state, joined, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// showTunnel mounts the network namespace of the overlay network where an agent sees it. It replaces
// Docker's own mount, which is hidden in the mount namespace of this engine.
func (r *Rig) showTunnel() error {
	// Docker names the namespace of an overlay network 1- and the network's id, and the namespace
	// of its load balancer lb_ and the id.
	pattern := fmt.Sprintf("/proc/%d/root%s/exec/netns/[0-9]-*", r.engine.process.PID, r.engine.dir)
	id, err := r.engine.run(context.Background(), nil, "network", "inspect", "--format", "{{.ID}}", swarmNetwork)
	if err != nil {
		return err
	}
	found, err := filepath.Glob(pattern + id[:10])
	if err != nil || len(found) != 1 {
		return fmt.Errorf("look for the network namespace of %s: found %v in %s: %v", swarmNetwork, found, pattern, err)
	}
	return r.mount(found[0])
}
