package netdev

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/safchain/ethtool"
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
	// sending end has none of it (veth.c, veth_skb_is_eligible_for_gro), or see UDPForward.
	TSO Offload = "tso"
	// UDPForward at the receiving end makes packets of local UDP and ICMP sockets take the NAPI
	// whatever the sender's TSO is.
	UDPForward Offload = "udp-gro-forwarding"
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
	case UDPForward:
		return []string{"rx-udp-gro-forwarding"}
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

func (o offload) Read() (string, error) {
	var on []string
	err := o.do(func(e *ethtool.Ethtool, name string) error {
		all, err := e.Features(name)
		if err != nil {
			return err
		}
		for _, f := range o.group.features() {
			if all[f] {
				on = append(on, f)
			}
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("read %s of device %d in netns %d: %w", o.group, o.index, o.ns.inode, err)
	}
	if len(on) == 0 {
		return Off, nil
	}
	return strings.Join(on, ","), nil
}

func (o offload) Write(value string) error {
	want := make(map[string]bool)
	for _, f := range o.group.features() {
		want[f] = false
	}
	if value != Off {
		for f := range strings.SplitSeq(value, ",") {
			if !slices.Contains(o.group.features(), f) {
				return fmt.Errorf("switch %s of device %d: %q is not of this group", o.group, o.index, f)
			}
			want[f] = true
		}
	}
	err := o.do(func(e *ethtool.Ethtool, name string) error { return e.Change(name, want) })
	if err != nil {
		return fmt.Errorf("switch %s of device %d in netns %d: %w", o.group, o.index, o.ns.inode, err)
	}
	return nil
}

func (o offload) do(fn func(e *ethtool.Ethtool, name string) error) error {
	err := o.ns.withName(o.index, func(name string) error {
		return o.ns.Do(func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			return fn(e, name)
		})
	})
	if errors.Is(err, ErrNoLink) || errors.Is(err, unix.ENODEV) {
		err = errors.Join(journal.ErrGone, err)
	}
	return err
}
