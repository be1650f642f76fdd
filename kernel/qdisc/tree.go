package qdisc

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// A tree is a foreign root qdisc with everything below it, in an order in which it can be made.
// Options are netlink's, byte for byte, except for counters.
type tree []node

type node struct {
	What    string `json:"what"` // "qdisc" or "class"
	Kind    string `json:"kind"`
	Handle  uint32 `json:"handle"`
	Parent  uint32 `json:"parent"`
	Options []byte `json:"options,omitempty"`
}

const (
	aQdisc = "qdisc"
	aClass = "class"
)

// maxTree limits the description of a tree, in bytes, so that it fits into the journal.
const maxTree = 48 << 10

// treePrefix starts the value of a root that can be restored, keptPrefix that of one that cannot
// and so must not be replaced.
const (
	treePrefix = "tree "
	keptPrefix = "not to be put back: "
)

// classful are the kinds with classes that must be made one by one; those of the others come with
// the qdisc.
var classful = []string{"htb", "hfsc", "drr", "qfq"}

// foreign describes a foreign root qdisc as a value of the knob.
func (d *Device) foreign(root message) (string, error) {
	t, why, err := d.tree(root)
	if err != nil {
		return "", err
	}
	if why != "" {
		return keptPrefix + root.kind + ": " + why, nil
	}
	b, err := json.Marshal(t)
	if err != nil {
		return "", err
	}
	if len(b) > maxTree {
		return keptPrefix + root.kind + ": it is too large to be written down", nil
	}
	return treePrefix + string(b), nil
}

// tree reads everything below root; why names what could not be recreated.
func (d *Device) tree(root message) (t tree, why string, err error) {
	qdiscs, err := d.qdiscs()
	if err != nil {
		return nil, "", err
	}
	all, err := d.dump(unix.RTM_GETTCLASS, message{})
	if err != nil {
		return nil, "", err
	}
	// The kernel lists no node as its own parent; the bound is for changes while the list is read.
	for next := []message{root}; len(next) > 0 && len(t) < maxTree/64; next = next[1:] {
		q := next[0]
		if q.keep != "" {
			return nil, q.keep, nil
		}
		t = append(t, node{aQdisc, q.kind, q.handle, q.parent, settled(q)})
		ids := []uint32{q.handle}
		if slices.Contains(classful, q.kind) {
			for parents := []uint32{rootParent}; len(parents) > 0; parents = parents[1:] {
				for _, c := range all {
					if c.handle>>16 != q.handle>>16 || c.handle == q.handle || c.parent != parents[0] {
						continue
					}
					if c.keep != "" {
						return nil, c.keep, nil
					}
					n := node{aClass, q.kind, c.handle, c.parent, c.options}
					if c.parent == rootParent {
						n.Parent = q.handle // as the kernel expects it
					}
					t = append(t, n)
					ids = append(ids, c.handle)
					parents = append(parents, c.handle)
				}
			}
		}
		for _, id := range ids {
			filters, err := d.dump(unix.RTM_GETTFILTER, message{parent: id})
			if err != nil {
				return nil, "", err
			}
			if len(filters) > 0 {
				return nil, "it has filters", nil
			}
		}
		for _, child := range qdiscs {
			// The kernel makes the qdiscs with handle 0 itself.
			if child.handle != 0 && child.parent != rootParent && child.parent>>16 == q.handle>>16 {
				next = append(next, child)
			}
		}
	}
	return t, "", nil
}

// settled returns a qdisc's options without the counters among them.
func settled(m message) []byte {
	switch m.kind {
	case "htb": // struct tc_htb_glob ends with direct_pkts
		return edit(m.options, htbInit, 20, func(glob []byte) { clear(glob[16:20]) })
	case "sfq": // struct tc_sfq_qopt_v1 ends with six counters, flags before
		const counters, size = 44, 68
		if len(m.options) == size {
			out := append([]byte{}, m.options...)
			clear(out[counters:])
			return out
		}
	}
	return m.options
}

// told returns a qdisc's options in the form that the kernel accepts, which may differ from the
// form that it shows.
func (n node) told() []byte {
	if n.What != aQdisc || n.Kind != "htb" {
		return n.Options
	}
	// The kernel shows the version in struct tc_htb_glob with the minor one in the lower half, and
	// takes it without (net/sched/sch_htb.c, htb_dump and htb_init).
	return edit(n.Options, htbInit, 20, func(glob []byte) {
		if v := binary.NativeEndian.Uint32(glob); v > 0xffff {
			binary.NativeEndian.PutUint32(glob, v>>16)
		}
	})
}

// edit changes an attribute, of at least size bytes, in a copy of some options.
func edit(options []byte, typ uint16, size int, how func([]byte)) []byte {
	var out []byte
	err := netdev.EachAttr(options, func(t uint16, value []byte) error {
		v := bytes.Clone(value)
		if t == typ && len(v) >= size {
			how(v)
		}
		out = append(out, nl.NewRtAttr(int(t), v).Serialize()...)
		return nil
	})
	if err != nil {
		return options
	}
	return out
}

// parseTree reads the value of a root that can be restored.
func parseTree(value string) (tree, error) {
	text, ok := strings.CutPrefix(value, treePrefix)
	if !ok {
		return nil, errors.New("no tree of qdiscs")
	}
	var t tree
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		return nil, fmt.Errorf("tree of qdiscs: %w", err)
	}
	if len(t) == 0 || t[0].What != aQdisc || t[0].Parent != rootParent {
		return nil, errors.New("tree of qdiscs without a root")
	}
	return t, nil
}

// has reports whether a tree has exactly this node.
func (t tree) has(n node) bool {
	return slices.ContainsFunc(t, func(m node) bool {
		return m.What == n.What && m.Kind == n.Kind && m.Handle == n.Handle && m.Parent == n.Parent && bytes.Equal(m.given(), n.given())
	})
}

// given returns the options without those that depend on the nodes below: an HTB class without any
// has another level.
func (n node) given() []byte {
	if n.What != aClass || n.Kind != "htb" {
		return n.Options
	}
	return edit(n.Options, htbParms, htbOptPrio, func(opt []byte) { clear(opt[htbOptLevel:htbOptPrio]) })
}

// unfinished reports whether value is the part of target that plant had made when it was killed.
func unfinished(value, target string) bool {
	part, err1 := parseTree(value)
	whole, err2 := parseTree(target)
	if err1 != nil || err2 != nil || !part.has(whole[0]) {
		return false
	}
	return !slices.ContainsFunc(part, func(n node) bool { return !whole.has(n) })
}

// plant makes a recorded tree, or the missing part of it, in place of the present root.
func (d *Device) plant(value string, now message) error {
	t, err := parseTree(value)
	if err != nil {
		return err
	}
	var have tree
	if now.handle == t[0].Handle {
		if have, _, err = d.tree(now); err != nil {
			return err
		}
	}
	for _, n := range t {
		if have.has(n) {
			continue
		}
		typ := unix.RTM_NEWQDISC
		if n.What == aClass {
			typ = unix.RTM_NEWTCLASS
		}
		m := message{handle: n.Handle, parent: n.Parent, kind: n.Kind, options: n.told()}
		if err := d.send(typ, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, m); err != nil {
			return fmt.Errorf("make %s %s %x: %w", n.Kind, n.What, n.Handle, err)
		}
	}
	return nil
}

// bench makes a scratch device in a scratch namespace. done removes both.
func bench(queues int) (d *Device, done func(), err error) {
	ns, err := netdev.New()
	if err != nil {
		return nil, nil, err
	}
	var index int
	err = ns.Do(func() error {
		queues = min(max(queues, 1), 1024)
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "flq0", NumTxQueues: queues, NumRxQueues: 1, TxQLen: 1000}, PeerName: "flq1"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		l, err := netlink.LinkByName("flq0")
		if err == nil {
			index = l.Attrs().Index
		}
		return err
	})
	if err == nil {
		d, err = Open(ns, index)
	}
	if err != nil {
		ns.Close()
		return nil, nil, fmt.Errorf("make a device to try on: %w", err)
	}
	return d, func() { d.Close(); ns.Close() }, nil
}

// rehearse checks whether a tree can be restored: it makes the tree on a scratch device, and
// compares.
func rehearse(value string, queues int) error {
	d, done, err := bench(queues)
	if err != nil {
		return err
	}
	defer done()
	if err := d.plant(value, message{}); err != nil {
		return err
	}
	root, err := d.root()
	if err != nil {
		return err
	}
	got, err := d.foreign(root)
	if err != nil {
		return err
	}
	if got != value {
		return errors.New("made again it is another")
	}
	return nil
}

// Supported checks whether the kernel has a kind of qdisc, by making one on a scratch device.
func Supported(kind Kind) error {
	d, done, err := bench(1)
	if err != nil {
		return err
	}
	defer done()
	if err := d.claim(message{}, kind); err != nil {
		return fmt.Errorf("make qdisc %s: %w", kind, err)
	}
	return nil
}
