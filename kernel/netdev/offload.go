package netdev

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

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
	err := o.do(func(e ethtool) error {
		numbers, blocks, err := e.features()
		if err != nil {
			return err
		}
		const size, active = 4, 2 // of struct ethtool_get_features_block, in words
		request := make([]uint32, 2+size*blocks)
		request[0], request[1] = unix.ETHTOOL_GFEATURES, uint32(blocks)
		if err := e.ask(request); err != nil {
			return err
		}
		for _, f := range o.group.features() {
			if n, ok := numbers[f]; ok && request[2+size*(n/32)+active]&(1<<(n%32)) != 0 {
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
	err := o.do(func(e ethtool) error {
		numbers, blocks, err := e.features()
		if err != nil {
			return err
		}
		const size, valid, requested = 2, 0, 1 // of struct ethtool_set_features_block
		request := make([]uint32, 2+size*blocks)
		request[0], request[1] = unix.ETHTOOL_SFEATURES, uint32(blocks)
		for f, on := range want {
			n, ok := numbers[f]
			if !ok {
				return fmt.Errorf("the kernel has no %s", f)
			}
			at := 2 + size*(n/32)
			request[at+valid] |= 1 << (n % 32)
			if on {
				request[at+requested] |= 1 << (n % 32)
			}
		}
		return e.ask(request)
	})
	if err != nil {
		return fmt.Errorf("switch %s of device %d in netns %d: %w", o.group, o.index, o.ns.inode, err)
	}
	return nil
}

func (o offload) do(fn func(ethtool) error) error {
	err := o.ns.withName(o.index, func(name string) error {
		return o.ns.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return fn(ethtool{fd, name})
		})
	})
	if errors.Is(err, ErrNoLink) || errors.Is(err, unix.ENODEV) {
		err = errors.Join(journal.ErrGone, err)
	}
	return err
}

// ethtool asks about one device (linux/ethtool.h).
type ethtool struct {
	fd   int
	name string
}

// ask makes a request, which begins with its command. The answer replaces it.
func (e ethtool) ask(request []uint32) error {
	ifreq := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // of the union
	}{data: unsafe.Pointer(&request[0])}
	copy(ifreq.name[:unix.IFNAMSIZ-1], e.name)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(e.fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifreq))); errno != 0 {
		return errno
	}
	return nil
}

// features returns the numbers of the kernel's features by name, and how many words of bits they
// take.
func (e ethtool) features() (numbers map[string]int, words int, err error) {
	const set, length = 4, 32 // ETH_SS_FEATURES, ETH_GSTRING_LEN
	info := []uint32{unix.ETHTOOL_GSSET_INFO, 0, 1 << set, 0, 0}
	if err := e.ask(info); err != nil {
		return nil, 0, err
	}
	count := int(info[4])
	request := make([]uint32, 3+count*length/4)
	request[0], request[1], request[2] = unix.ETHTOOL_GSTRINGS, set, uint32(count)
	if err := e.ask(request); err != nil {
		return nil, 0, err
	}
	numbers = make(map[string]int, count)
	for i := range count {
		name := unsafe.Slice((*byte)(unsafe.Pointer(&request[3+i*length/4])), length)
		numbers[unix.ByteSliceToString(name)] = i
	}
	return numbers, (count + 31) / 32, nil
}
