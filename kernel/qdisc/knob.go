package qdisc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// The journal kinds of this package.
const (
	KindRoot     = "qdisc"
	KindQueueLen = "txqueuelen"
	KindForward  = "forward-priority"
)

// Default is the value of a Root knob for the qdisc that the kernel chose.
const Default = "default"

// Ours is the value of a Root knob for our own qdisc of a kind. The value excludes its classes,
// which go with it and need no entry of their own.
func Ours(kind Kind) string { return fmt.Sprintf("%s %x:", kind, Handle>>16) }

// ErrKept is returned, wrapped with the reason, by a Write that would replace a root qdisc that
// could not be restored.
var ErrKept = errors.New("it already has a shaper of somebody else, which could not be put back")

// Root returns the knob of a device's root qdisc. Its value is Default, Ours of a kind, or a full
// description of a foreign qdisc. Write of Ours makes the qdisc without classes: until there are
// some, packets pass unshaped.
//
// Writing replaces the present qdisc, and loses the packets in it: the kernel has no other way.
// Errors of Write: ErrKept.
func Root(ns *netdev.NS, index int) journal.Knob { return root{ns, index} }

type root struct {
	ns    *netdev.NS
	index int
}

func (r root) Ref() journal.Ref { return ref(KindRoot, r.ns, r.index) }

func (r root) Read() (value string, err error) {
	err = r.do("read root qdisc", func(d *Device) error {
		q, err := d.root()
		if err != nil {
			return err
		}
		value, err = d.value(q)
		return err
	})
	return value, err
}

// Unmarked tells the journal what is ours without an entry: the kernel does not give out our handle.
func (r root) Unmarked(value string) (before string, ours bool) {
	return Default, value == Ours(KindHTB) || value == Ours(KindHFSC)
}

// Unfinished implements journal.Stepwise: a foreign tree of qdiscs is restored node by node.
func (r root) Unfinished(value, _, target string) bool { return unfinished(value, target) }

// value describes a root qdisc.
func (d *Device) value(q message) (string, error) {
	switch {
	case q.handle == 0:
		return Default, nil
	case q.handle == Handle:
		return Ours(Kind(q.kind)), nil
	}
	return d.foreign(q)
}

func (r root) Write(value string) error {
	return r.do("replace root qdisc", func(d *Device) error {
		now, err := d.root()
		if err != nil {
			return err
		}
		switch {
		case strings.HasPrefix(value, treePrefix):
			return d.plant(value, now)
		case value == Default:
			return d.clear(now)
		case value == Ours(KindHTB):
			return d.claim(now, KindHTB)
		case value == Ours(KindHFSC):
			return d.claim(now, KindHFSC)
		}
		return fmt.Errorf("%.100q is nothing to be written", value)
	})
}

// clear removes the root qdisc, so that the kernel chooses one.
func (d *Device) clear(now message) error {
	if now.handle == 0 {
		return nil
	}
	return d.send(unix.RTM_DELQDISC, 0, message{handle: now.handle, parent: rootParent})
}

// claim replaces the present root with ours.
func (d *Device) claim(now message, kind Kind) error {
	switch {
	case now.handle == Handle && now.kind == string(kind):
		return nil
	case now.handle == Handle: // the same handle cannot change its kind
		if err := d.clear(now); err != nil {
			return err
		}
	case now.handle != 0:
		if err := d.keepable(now); err != nil {
			return fmt.Errorf("%w: %w", ErrKept, err)
		}
	}
	m := message{handle: Handle, parent: rootParent, kind: string(kind), options: rootOptions(kind)}
	return d.send(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m)
}

// keepable reports whether a foreign root could be restored.
func (d *Device) keepable(now message) error {
	value, err := d.foreign(now)
	if err != nil {
		return err
	}
	if why, kept := strings.CutPrefix(value, keptPrefix); kept {
		return errors.New(why)
	}
	link, err := d.ns.Link(d.index)
	if err != nil {
		return err
	}
	if err := rehearse(value, link.TxQueues); err != nil {
		return fmt.Errorf("%s: tried: %w", now.kind, err)
	}
	return nil
}

func (r root) do(op string, fn func(*Device) error) error {
	d, err := Open(r.ns, r.index)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := fn(d); err != nil {
		return d.wrap(op, err)
	}
	return nil
}

// QueueLen returns the knob of a device's queue length, in packets. The kernel changes a length of
// 0 to 1000 as soon as the device gets a qdisc, and never changes it back. So turn this knob before
// the root's.
func QueueLen(ns *netdev.NS, index int) journal.Knob { return queueLen{ns, index} }

// DefaultQueueLen is what the kernel changes 0 to (DEFAULT_TX_QUEUE_LEN).
const DefaultQueueLen = "1000"

type queueLen struct {
	ns    *netdev.NS
	index int
}

func (q queueLen) Ref() journal.Ref { return ref(KindQueueLen, q.ns, q.index) }

func (q queueLen) Read() (value string, err error) {
	err = q.do("read queue length", func(l netlink.Link) error {
		value = strconv.Itoa(l.Attrs().TxQLen)
		return nil
	})
	return value, err
}

func (q queueLen) Write(value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 {
		return fmt.Errorf("set queue length of device %d: %q is none", q.index, value)
	}
	return q.do("set queue length", func(l netlink.Link) error { return netlink.LinkSetTxQLen(l, n) })
}

func (q queueLen) do(op string, fn func(netlink.Link) error) error {
	err := q.ns.Do(func() error {
		l, err := netlink.LinkByIndex(q.index)
		if err != nil {
			return err
		}
		return fn(l)
	})
	if err = gone(err); err != nil {
		return fmt.Errorf("%s of device %d in netns %d: %w", op, q.index, q.ns.Inode(), err)
	}
	return nil
}

// ForwardPriority returns the knob of net.ipv4.ip_forward_update_priority in a namespace. With "1"
// (the kernel's default) IPv4 forwarding overwrites skb->priority with a value from the packet's
// TOS. With "0" it keeps the priority, as IPv6 forwarding always does. proc is a mount of proc whose
// sys is writable.
func ForwardPriority(proc string, ns *netdev.NS) journal.Knob {
	return forward{filepath.Join(proc, "sys/net/ipv4/ip_forward_update_priority"), ns}
}

type forward struct {
	file string
	ns   *netdev.NS
}

func (f forward) Ref() journal.Ref { return ref(KindForward, f.ns, 0) }

// /proc/sys/net shows the namespace of the opening thread.
func (f forward) Read() (value string, err error) {
	err = f.ns.Do(func() error {
		b, err := os.ReadFile(f.file)
		value = strings.TrimSpace(string(b))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read forwarding of netns %d: %w", f.ns.Inode(), err)
	}
	return value, nil
}

func (f forward) Write(value string) error {
	err := f.ns.Do(func() error { return os.WriteFile(f.file, []byte(value), 0o644) })
	if err != nil {
		return fmt.Errorf("set forwarding of netns %d: %w", f.ns.Inode(), err)
	}
	return nil
}

// ref names a knob of one device. Its namespace is an inode, since paths come and go.
func ref(kind string, ns *netdev.NS, index int) journal.Ref {
	return journal.Ref{Kind: kind, Object: fmt.Sprintf("%d/%d", ns.Inode(), index)}
}

// OpenKnob opens a knob by its entry in the journal; proc is as in [ForwardPriority]. A filter's can
// only remove it. Errors: those of [netdev.OpenAt].
func OpenKnob(proc string, find *netdev.Finder, r journal.Ref) (journal.Knob, error) {
	return netdev.OpenAt(find, r, r.Kind == KindFilter, func(kind, detail string) (func(*netdev.NS, int) journal.Knob, error) {
		switch hook, name, _ := strings.Cut(detail, "/"); {
		case kind == KindRoot:
			return Root, nil
		case kind == KindQueueLen:
			return QueueLen, nil
		case kind == KindForward:
			return func(ns *netdev.NS, _ int) journal.Knob { return ForwardPriority(proc, ns) }, nil
		case kind == KindFilter && (hook == "ingress" || hook == "egress") && name != "" && !strings.Contains(name, "/"):
			return func(ns *netdev.NS, index int) journal.Knob {
				return filterKnob{ns: ns, index: index, egress: hook == "egress", name: name}
			}, nil
		}
		return nil, errors.New("unknown kind or detail")
	})
}

var _ journal.Stepwise = root{}
