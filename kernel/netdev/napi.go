package netdev

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
)

// ErrNoNAPIList means that the kernel's netlink does not list NAPI contexts (since 6.7). Threads
// must then be identified by their names.
var ErrNoNAPIList = errors.New("kernel does not list napi contexts")

// NAPI is one polling context of a device.
type NAPI struct {
	ID     int // unique on the host while the context exists
	Device int // index
	Thread int // thread id of its kernel thread; 0 if it runs in softirq
}

// The netdev generic netlink family, include/uapi/linux/netdev.h.
const (
	netdevNAPIGet = 11 // NETDEV_CMD_NAPI_GET
	napiIfindex   = 1  // NETDEV_A_NAPI_IFINDEX
	napiID        = 2  // NETDEV_A_NAPI_ID
	napiPID       = 4  // NETDEV_A_NAPI_PID
)

// NAPIs lists the polling contexts of one device, or of every device in the namespace for index 0,
// by ID. Errors: ErrNoNAPIList, ErrNoLink.
func (ns *NS) NAPIs(index int) ([]NAPI, error) {
	var list []NAPI
	err := ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("netdev")
		if err != nil {
			return fmt.Errorf("%w: %w", ErrNoNAPIList, err)
		}
		req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_DUMP)
		req.AddData(genlHeader{netdevNAPIGet, 1})
		if index != 0 {
			req.AddData(nl.NewRtAttr(napiIfindex, nl.Uint32Attr(uint32(index))))
		}
		err = dump(unix.NETLINK_GENERIC, false, req, func(msg []byte) (bool, error) {
			n, err := parseNAPI(msg)
			if err == nil && (index == 0 || n.Device == index) {
				list = append(list, n)
			}
			return true, err
		})
		if errors.Is(err, unix.ENODEV) {
			return ErrNoLink
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("%w: %w", ErrNoNAPIList, err)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list napi of device %d in netns %d: %w", index, ns.inode, err)
	}
	slices.SortFunc(list, func(a, b NAPI) int { return a.ID - b.ID })
	return list, nil
}

// genlHeader is a generic netlink header: command, version and two reserved bytes, which newer
// families require to be zero and nl.Genlmsg does not set.
type genlHeader [nl.SizeofGenlmsg]byte

func (h genlHeader) Len() int          { return len(h) }
func (h genlHeader) Serialize() []byte { return h[:] }

// parseNAPI reads one NAPI out of a generic netlink message, its 4-byte header included.
func parseNAPI(msg []byte) (NAPI, error) {
	var n NAPI
	if len(msg) < nl.SizeofGenlmsg {
		return n, errors.New("short netdev message")
	}
	err := EachAttr(msg[nl.SizeofGenlmsg:], func(typ uint16, v []byte) error {
		switch typ {
		case napiIfindex:
			n.Device = int(number(v))
		case napiID:
			n.ID = int(number(v))
		case napiPID:
			n.Thread = int(number(v))
		}
		return nil
	})
	if err != nil {
		return NAPI{}, err
	}
	return n, nil
}

// Threaded returns the knob that makes the kernel poll every NAPI of a device in a kernel thread
// ("1") or in the softirq ("0").
func (ns *NS) Threaded(index int) journal.Knob {
	return sysfsKnob{KindThreaded, "", attribute{ns, index, "threaded"}}
}

// InThreads reports whether kernel threads poll a device, or would poll it. Errors: journal.ErrGone
// or ErrNoLink if the device has gone.
func (ns *NS) InThreads(index int) (bool, error) {
	list, err := ns.NAPIs(index)
	if errors.Is(err, ErrNoNAPIList) {
		value, err := ns.Threaded(index).Read()
		return value == "1", err
	}
	return slices.ContainsFunc(list, func(n NAPI) bool { return n.Thread != 0 }), err
}

// RPS returns the knob of the CPUs to which a receive queue passes its packets, as the mask in sysfs.
// A queue served by a thread must not pass them on: that would move the work out of the thread.
func (ns *NS) RPS(index, queue int) journal.Knob {
	return sysfsKnob{KindRPS, fmt.Sprint(queue), attribute{ns, index, fmt.Sprintf("queues/rx-%d/rps_cpus", queue)}}
}

// RFS returns the knob of how many flows of a receive queue follow their readers to other CPUs; 0:
// none. They follow regardless of the CPUs of RPS.
func (ns *NS) RFS(index, queue int) journal.Knob {
	return sysfsKnob{KindRFS, fmt.Sprint(queue), attribute{ns, index, fmt.Sprintf("queues/rx-%d/rps_flow_cnt", queue)}}
}

// Deferral is an attribute of a device that delays its next poll
// (Documentation/networking/napi.rst, "Software IRQ coalescing"). Both have to be set.
type Deferral string

const (
	HardIRQs     Deferral = "napi_defer_hard_irqs" // number of empty polls that end it; 0: never begins
	FlushTimeout Deferral = "gro_flush_timeout"    // time until the next poll, in ns
)

// Defer returns the knob of one part of a device's deferral of polls. After a poll that used less
// than its budget, a timer starts the next poll, instead of the next packet.
func (ns *NS) Defer(index int, d Deferral) journal.Knob {
	return sysfsKnob{KindDefer, string(d), attribute{ns, index, string(d)}}
}

// MaskCPUs returns the sorted CPUs of a mask of RPS: hexadecimal words of 32 bits, the highest
// first, separated by commas.
func MaskCPUs(mask string) ([]int, error) {
	var cpus []int
	words := strings.Split(mask, ",")
	for i := range words {
		word := words[len(words)-1-i]
		bits, err := strconv.ParseUint(word, 16, 32)
		if err != nil {
			return nil, fmt.Errorf("mask of cpus %q: %w", mask, err)
		}
		for b := range 32 {
			if bits>>b&1 != 0 {
				cpus = append(cpus, i*32+b)
			}
		}
	}
	return cpus, nil
}

// CPUMask returns the mask of CPUs in the form of another mask of the kernel, with as many digits.
// It omits CPUs beyond these.
func CPUMask(cpus []int, like string) string {
	mask, first := []byte(like), 0
	for i := len(mask) - 1; i >= 0; i-- {
		if mask[i] == ',' {
			continue
		}
		digit := 0
		for _, cpu := range cpus {
			if cpu >= first && cpu < first+4 {
				digit |= 1 << (cpu - first)
			}
		}
		mask[i] = "0123456789abcdef"[digit]
		first += 4
	}
	return string(mask)
}

type sysfsKnob struct {
	kind, detail string
	attr         attribute
}

func (k sysfsKnob) Ref() journal.Ref {
	return deviceRef(k.kind, k.attr.ns, k.attr.index, k.detail)
}
func (k sysfsKnob) Read() (string, error)    { return k.attr.read() }
func (k sysfsKnob) Write(value string) error { return k.attr.write(value) }

// Hold opens the file of a sysfs knob for repeated reads: opening it takes longer than everything
// else. The file keeps neither the device nor its namespace alive, because a sysfs mount does not.
func Hold(k journal.Knob) (held *os.File, err error) {
	of := k.(sysfsKnob).attr
	err = of.open(os.O_RDONLY, func(f *os.File) error {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		held = os.NewFile(uintptr(fd), of.file)
		return err
	})
	return held, of.wrap("open", err)
}

// Exposes names the superblock of the namespace's sysfs, which Write makes writable if a container
// runtime has made it read-only.
func (k sysfsKnob) Exposes() (journal.Ref, string, string, error) {
	s := superblock{k.attr.ns}
	now, err := s.Read()
	if err != nil || now == writable {
		return journal.Ref{}, "", "", err
	}
	return s.Ref(), now, writable, nil
}
