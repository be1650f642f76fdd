package netdev

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Tunnel is a device of kind vxlan or geneve: it wraps Ethernet frames into UDP.
type Tunnel struct {
	Link // PeerNS is the id of the namespace that routes the outer packets

	VNI     uint32
	Port    uint16     // UDP destination of the outer packets
	Sources [2]uint16  // first and last UDP source port of them; 0, 0: as LocalPorts of the device's namespace
	Local   netip.Addr // source of them; invalid if routing chooses it
	Remote  netip.Addr // destination without an FDB entry, may be a group; invalid if there is none
	Below   int        // index of the device that they leave by; 0 if routing chooses it

	InheritTOS   bool // outer fields that are copied from each inner packet
	InheritTTL   bool
	InheritDF    bool
	InheritLabel bool // IPv6 flow label

	External bool // each packet's metadata has VNI and addresses (collect metadata): a program above decides
	GBP      bool // the header has a group policy
	GPE      bool // it has a protocol, and no Ethernet need follow
	Inner    bool // Geneve takes packets without Ethernet (innerprotoinherit)

	Checksum   bool // outer UDP checksums over IPv4
	RemoteCsum bool // inner checksums are left to the receiver (remcsum), sent or taken
}

// Of linux/if_link.h.
const (
	genevePortRange = 15 // IFLA_GENEVE_PORT_RANGE (6.15)
	dfInherit       = 2  // VXLAN_DF_INHERIT, GENEVE_DF_INHERIT
	labelInherit    = 1  // VXLAN_LABEL_INHERIT
	tosInherit      = 1
)

// IsTunnel reports whether the device is a tunnel, which [NS.Tunnels] lists.
func (l Link) IsTunnel() bool { return l.Kind == "vxlan" || l.Kind == "geneve" }

// Tunnels lists the tunnels of the namespace, without their addresses. It looks at up to most
// devices: an error that matches [ErrMany] comes with those seen so far.
func (ns *NS) Tunnels(most int) ([]Tunnel, error) {
	list, err := bounded(ns, unix.NETLINK_ROUTE, most, false, linksRequest(0), parseTunnel)
	return list, ns.listed("tunnels", most, err)
}

// parseTunnel reads an RTM_NEWLINK message; ok: it is a tunnel.
func parseTunnel(msg []byte) (t Tunnel, ok bool, err error) {
	if t.Link, err = parseLink(msg); err != nil || !t.IsTunnel() {
		return t, false, err
	}
	read := t.vxlan
	if t.Kind == "geneve" {
		read = t.geneve
		t.Sources = [2]uint16{1, 1<<16 - 1} // if the kernel does not report them (geneve_xmit_skb)
	}
	var data []byte
	err = eachAt(msg[unix.SizeofIfInfomsg:], func(v []byte) { data = v }, unix.IFLA_LINKINFO, unix.IFLA_INFO_DATA)
	if err == nil {
		err = EachAttr(data, read)
	}
	return t, err == nil, err
}

func (t *Tunnel) vxlan(typ uint16, v []byte) error {
	switch typ {
	case unix.IFLA_VXLAN_ID:
		t.VNI = number(v)
	case unix.IFLA_VXLAN_GROUP, unix.IFLA_VXLAN_GROUP6:
		t.Remote = address(v)
	case unix.IFLA_VXLAN_LOCAL, unix.IFLA_VXLAN_LOCAL6:
		t.Local = address(v)
	case unix.IFLA_VXLAN_LINK:
		t.Below = int(number(v))
	case unix.IFLA_VXLAN_PORT:
		t.Port = port(v)
	case unix.IFLA_VXLAN_PORT_RANGE:
		t.Sources = ports(v)
	case unix.IFLA_VXLAN_TOS:
		t.InheritTOS = octet(v) == tosInherit
	case unix.IFLA_VXLAN_TTL_INHERIT:
		t.InheritTTL = octet(v) != 0
	case unix.IFLA_VXLAN_DF:
		t.InheritDF = octet(v) == dfInherit
	case unix.IFLA_VXLAN_LABEL_POLICY:
		t.InheritLabel = number(v) == labelInherit
	case unix.IFLA_VXLAN_COLLECT_METADATA:
		t.External = octet(v) != 0
	case unix.IFLA_VXLAN_GBP:
		t.GBP = true // a flag: it has no value
	case unix.IFLA_VXLAN_GPE:
		t.GPE = true
	case unix.IFLA_VXLAN_UDP_CSUM:
		t.Checksum = octet(v) != 0
	case unix.IFLA_VXLAN_REMCSUM_TX, unix.IFLA_VXLAN_REMCSUM_RX:
		t.RemoteCsum = t.RemoteCsum || octet(v) != 0
	}
	return nil
}

func (t *Tunnel) geneve(typ uint16, v []byte) error {
	switch typ {
	case unix.IFLA_GENEVE_ID:
		t.VNI = number(v)
	case unix.IFLA_GENEVE_REMOTE, unix.IFLA_GENEVE_REMOTE6:
		t.Remote = address(v)
	case unix.IFLA_GENEVE_PORT:
		t.Port = port(v)
	case genevePortRange:
		t.Sources = ports(v)
	case unix.IFLA_GENEVE_TOS:
		t.InheritTOS = octet(v) == tosInherit
	case unix.IFLA_GENEVE_TTL_INHERIT:
		t.InheritTTL = octet(v) != 0
	case unix.IFLA_GENEVE_DF:
		t.InheritDF = octet(v) == dfInherit
	case unix.IFLA_GENEVE_INNER_PROTO_INHERIT:
		t.Inner = true // a flag
	case unix.IFLA_GENEVE_COLLECT_METADATA:
		t.External = true // a flag
	case unix.IFLA_GENEVE_UDP_CSUM:
		t.Checksum = octet(v) != 0
	}
	return nil
}

// LocalPorts reads net.ipv4.ip_local_port_range: the first and the last port that the kernel
// chooses in the namespace.
func (ns *NS) LocalPorts() (ports [2]uint16, err error) {
	err = ns.Do(func() error {
		// /proc/sys/net shows the namespace of the opening thread.
		b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
		if err == nil {
			_, err = fmt.Sscan(string(b), &ports[0], &ports[1])
		}
		return err
	})
	if err != nil {
		return [2]uint16{}, fmt.Errorf("read local ports of netns %d: %w", ns.inode, err)
	}
	return ports, nil
}

func octet(v []byte) uint8   { return whole(v, 1)[0] }
func port(v []byte) uint16   { return binary.BigEndian.Uint16(whole(v, 2)) }
func number(v []byte) uint32 { return binary.NativeEndian.Uint32(whole(v, 4)) }
func ports(v []byte) [2]uint16 {
	v = whole(v, 4)
	return [2]uint16{port(v), port(v[2:])}
}

// whole returns a value of the kernel's; zero for one that is too short.
func whole(v []byte, size int) []byte {
	if len(v) < size {
		return make([]byte, size)
	}
	return v
}

// address returns an invalid address for the unspecified one, the kernel's none.
func address(v []byte) netip.Addr {
	a, ok := netip.AddrFromSlice(v)
	if !ok || a.IsUnspecified() {
		return netip.Addr{}
	}
	return a
}
