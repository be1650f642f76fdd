package netdev

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// Offload is a group of ethtool features that are switched together.
type Offload string

// The groups that fairlead switches.
const (
	// GRO at the receiving end of a veth makes it use NAPI (veth.c, veth_gro_requested).
	GRO Offload = "gro"
	// TSO is all of NETIF_F_ALL_TSO. A veth takes a packet through its peer's NAPI only when the
	// sending end has none of it (veth.c, veth_skb_is_eligible_for_gro).
	TSO Offload = "tso"
	// HardwareGRO is the device's own merging of received packets, which XDP programs cannot take.
	HardwareGRO Offload = "hardware-gro"
)

// features returns the kernel's names (net/ethtool/common.c) of a group.
func (o Offload) features() []string {
	switch o {
	case GRO:
		return []string{"rx-gro"}
	case TSO:
		return []string{"tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation", "tx-tcp-segmentation", "tx-tcp6-segmentation"}
	case HardwareGRO:
		return []string{"rx-gro-hw", "rx-lro"}
	}
	return nil
}

// On is the value of an offload knob with the whole group switched on, Off with all of it switched
// off.
func (o Offload) On() string { return strings.Join(o.features(), ",") }

// Off is the value of an offload knob with nothing switched on.
const Off = "off"

// Offload returns the knob of one group on the device with the given index. Its value is the
// comma-separated list of those features of the group that are on, or [Off].
func (ns *NS) Offload(index int, group Offload) journal.Knob {
	return offload{ns, index, group}
}

type offload struct {
	ns    *NS
	index int
	group Offload
}

func (o offload) Ref() journal.Ref {
	return deviceRef(KindOffload, o.ns, o.index, string(o.group))
}

// The ethtool generic netlink family, include/uapi/linux/ethtool_netlink.h.
const (
	featuresGet    = 11 // ETHTOOL_MSG_FEATURES_GET
	featuresSet    = 12 // ETHTOOL_MSG_FEATURES_SET
	featuresHeader = 1  // ETHTOOL_A_FEATURES_HEADER
	headerDevice   = 1  // ETHTOOL_A_HEADER_DEV_INDEX
	featuresWanted = 3  // ETHTOOL_A_FEATURES_WANTED
	featuresActive = 4  // ETHTOOL_A_FEATURES_ACTIVE
	bitsetBits     = 3  // ETHTOOL_A_BITSET_BITS
	bitsetBit      = 1  // ETHTOOL_A_BITSET_BITS_BIT
	bitName        = 2  // ETHTOOL_A_BITSET_BIT_NAME
	bitValue       = 3  // ETHTOOL_A_BITSET_BIT_VALUE
)

func (o offload) Read() (string, error) {
	var active []string
	err := o.ask(featuresGet, nil, func(msg []byte) error {
		return eachAt(msg, func(name []byte) { active = append(active, unix.ByteSliceToString(name)) },
			featuresActive, bitsetBits, bitsetBit, bitName)
	})
	if err != nil {
		return "", fmt.Errorf("read %s of device %d in netns %d: %w", o.group, o.index, o.ns.inode, err)
	}
	on := slices.DeleteFunc(o.group.features(), func(f string) bool { return !slices.Contains(active, f) })
	if len(on) == 0 {
		return Off, nil
	}
	return strings.Join(on, ","), nil
}

func (o offload) Write(value string) error {
	var on []string
	if value != Off {
		on = strings.Split(value, ",")
	}
	for _, f := range on {
		if !slices.Contains(o.group.features(), f) {
			return fmt.Errorf("switch %s of device %d: %q is not of this group", o.group, o.index, f)
		}
	}
	wanted := nl.NewRtAttr(unix.NLA_F_NESTED|featuresWanted, nil)
	bits := wanted.AddRtAttr(unix.NLA_F_NESTED|bitsetBits, nil)
	for _, f := range o.group.features() {
		bit := bits.AddRtAttr(unix.NLA_F_NESTED|bitsetBit, nil)
		bit.AddRtAttr(bitName, nl.ZeroTerminated(f))
		if slices.Contains(on, f) {
			bit.AddRtAttr(bitValue, nil)
		}
	}
	if err := o.ask(featuresSet, wanted, func([]byte) error { return nil }); err != nil {
		return fmt.Errorf("switch %s of device %d in netns %d: %w", o.group, o.index, o.ns.inode, err)
	}
	return nil
}

// ask makes a request about the device, and passes the attributes of the answer to see.
func (o offload) ask(command byte, about *nl.RtAttr, see func(attrs []byte) error) error {
	err := o.ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("ethtool")
		if err != nil {
			return err
		}
		req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
		req.AddData(genlHeader{command, 1})
		header := nl.NewRtAttr(unix.NLA_F_NESTED|featuresHeader, nil)
		header.AddRtAttr(headerDevice, nl.Uint32Attr(uint32(o.index)))
		req.AddData(header)
		if about != nil {
			req.AddData(about)
		}
		return dump(unix.NETLINK_GENERIC, false, req, func(msg []byte) (bool, error) {
			return true, see(msg[min(len(msg), nl.SizeofGenlmsg):])
		})
	})
	if errors.Is(err, unix.ENODEV) {
		err = errors.Join(journal.ErrGone, err)
	}
	return err
}
