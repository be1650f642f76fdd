package qdisc

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// filterKnob is one filter of ours at a device. Its value is "program ID" while the filter is
// there, and otherwise noFilter or noClsact. Removing the filter restores the earlier one of these
// two, so a clsact made for ours goes with the last filter. The filters' labels record that it was
// made for ours. A qdisc has no owner in the kernel, so a foreign filter in our clsact keeps it
// there.
type filterKnob struct {
	ns     *netdev.NS
	index  int
	egress bool
	stage  Stage
	name   string
	// program is what Write attaches; nil: it can only remove.
	program *ebpf.Program
}

// A handle of ours has the stage in its upper byte. Preferences are tried from the first, or the
// last, because a filter of another kind, which cannot share ours, may use one.
const (
	clsactHandle            = 0xffff0000
	hookIngress, hookEgress = 0xfffffff2, 0xfffffff3 // TC_H_CLSACT, TC_H_MIN_INGRESS and _EGRESS
	firstPref, lastPref     = 1, 0xffff
	prefTries               = 16
	labelPlain, labelMade   = "fairlead: ", "fairlead, clsact: "
)

// filter is one of the kernel's list.
type filter struct {
	message
	pref  uint16
	label string // TCA_BPF_NAME
	id    uint32 // of its program
}

func (f filter) ours() (name string, made, ok bool) {
	if f.kind != "bpf" || f.handle&0xffff0000 != Handle {
		return "", false, false
	}
	if name, ok = strings.CutPrefix(f.label, labelMade); ok {
		return name, true, true
	}
	name, ok = strings.CutPrefix(f.label, labelPlain)
	return name, false, ok
}

func (f filter) stage() Stage { return Stage(f.handle >> 8) }

func (k filterKnob) hook() string {
	if k.egress {
		return "egress"
	}
	return "ingress"
}

func (k filterKnob) parent() uint32 {
	if k.egress {
		return hookEgress
	}
	return hookIngress
}

// value returns the result of Read once the program is attached.
func (k filterKnob) value() (string, error) {
	info, err := k.program.Info()
	if err != nil {
		return "", err
	}
	id, _ := info.ID()
	return programValue(uint32(id)), nil
}

func programValue(id uint32) string { return fmt.Sprintf("program %d", id) }

// Unfinished implements journal.Stepwise: clsact and filter come and go one after the other.
func (k filterKnob) Unfinished(value, _, target string) bool {
	return value == noFilter && target == noClsact
}

// Read implements journal.Knob.
func (k filterKnob) Read() (value string, err error) {
	err = root{k.ns, k.index}.do("read filters", func(d *Device) error {
		s, err := k.look(d)
		if err != nil {
			return err
		}
		switch {
		case len(s.own) > 0:
			value = programValue(s.own[0].id)
		case s.kind == "" || s.made:
			value = noClsact
		default:
			value = noFilter
		}
		return nil
	})
	return value, err
}

// situation is the state of a device.
type situation struct {
	kind  string   // of the qdisc with the hooks; "" for none
	own   []filter // of this knob: two if a process was killed while it moved one
	made  bool     // a filter of ours records that the qdisc was made for it
	there []filter // at the knob's hook
	count int      // number of filters at both hooks
}

func (k filterKnob) look(d *Device) (s situation, err error) {
	q, err := d.clsact()
	if err != nil || q.kind == "" {
		return s, err
	}
	s.kind = q.kind
	for _, parent := range []uint32{hookIngress, hookEgress} {
		if parent == hookEgress && q.kind != "clsact" {
			break // the older qdisc ingress has only the ingress hook
		}
		list, err := d.filters(parent)
		if err != nil {
			return s, err
		}
		s.count += len(list)
		for _, f := range list {
			name, made, ours := f.ours()
			s.made = s.made || ours && made
			if parent != k.parent() {
				continue
			}
			s.there = append(s.there, f)
			if ours && name == k.name {
				s.own = append(s.own, f)
			}
		}
	}
	return s, nil
}

// Marked returns the knobs of all filters of ours at a device, with the value that each had before.
// Errors: journal.ErrGone.
func Marked(ns *netdev.NS, index int) (was map[journal.Knob]string, err error) {
	was = make(map[journal.Knob]string)
	err = root{ns, index}.do("look for filters", func(d *Device) error {
		for _, egress := range []bool{false, true} {
			k := filterKnob{ns: ns, index: index, egress: egress}
			s, err := k.look(d)
			if err != nil {
				return err
			}
			before := noFilter
			if s.made {
				before = noClsact
			}
			for _, f := range s.there {
				var ours bool
				if k.name, _, ours = f.ours(); ours {
					was[k] = before
				}
			}
		}
		return nil
	})
	return was, err
}

// Write implements journal.Knob.
func (k filterKnob) Write(value string) error {
	return root{k.ns, k.index}.do("change filter", func(d *Device) error {
		s, err := k.look(d)
		if err != nil {
			return err
		}
		if value == noFilter || value == noClsact {
			return k.remove(d, s, value == noClsact)
		}
		if k.program == nil {
			return fmt.Errorf("%.100q cannot be attached again: it went with its process", value)
		}
		if want, err := k.value(); err != nil || want != value {
			return errors.Join(err, fmt.Errorf("%.100q is not the program at hand", value))
		}
		return k.add(d, s)
	})
}

func (k filterKnob) add(d *Device, s situation) error {
	if k.egress && s.kind != "" && s.kind != "clsact" {
		return fmt.Errorf("somebody has put a qdisc %s there, which has no hook for what is sent", s.kind)
	}
	label := labelPlain
	if s.kind == "" {
		err := d.send(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL, message{handle: clsactHandle, parent: ingressParent, kind: "clsact"})
		if err != nil && !errors.Is(err, unix.EEXIST) { // it came in between
			return fmt.Errorf("make clsact: %w", err)
		}
		s.made = err == nil
	}
	if s.made {
		label = labelMade
	}
	label += k.name
	if len(s.own) == 1 && s.own[0].stage() == k.stage { // in its place
		return k.send(d, s.own[0].pref, s.own[0].handle, label, 0)
	}
	if err := k.drop(d, s.own); err != nil {
		return err
	}
	was := slices.Clone(s.there)
	if err := k.insert(d, &s, label); err != nil || k.stage >= Others {
		return err
	}
	// Filters of ours with earlier stages go in front of it, the last one first. Each exists twice
	// for a moment, so that it is never missing.
	slices.SortStableFunc(was, func(f, g filter) int { return cmp.Compare(g.stage(), f.stage()) })
	for _, f := range was {
		name, _, ours := f.ours()
		if !ours || name == k.name || f.stage() >= k.stage {
			continue
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(f.id))
		if err != nil {
			return err
		}
		first := filterKnob{ns: k.ns, index: k.index, egress: k.egress, stage: f.stage(), name: name, program: p}
		err = errors.Join(first.insert(d, &s, f.label), p.Close())
		if err == nil {
			err = first.drop(d, []filter{f})
		}
		if err != nil {
			return fmt.Errorf("move %s to the front: %w", name, err)
		}
	}
	return nil
}

// insert makes the filter where it runs before those of its half, ours and foreign.
func (k filterKnob) insert(d *Device, s *situation, label string) (err error) {
	handle := Handle | uint32(k.stage)<<8
	for slices.ContainsFunc(s.there, func(f filter) bool { return f.handle == handle }) {
		handle++
	}
	for i := range uint16(prefTries) {
		pref := firstPref + i
		if k.stage >= Others { // each stage has separate preferences
			pref = lastPref - uint16(Stages-1-k.stage)*prefTries - i
		}
		// Within one preference the newest comes first (net/sched/cls_bpf.c, cls_bpf_change). A
		// preference of another kind or protocol refuses ours.
		err = k.send(d, pref, handle, label, unix.NLM_F_EXCL)
		if err == nil {
			s.there = append(s.there, filter{message: message{handle: handle}})
			return nil
		}
		if errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return err
}

// send makes or replaces the filter.
func (k filterKnob) send(d *Device, pref uint16, handle uint32, label string, flags int) error {
	return d.send(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|flags, message{
		handle: handle, parent: k.parent(), info: filterInfo(pref), kind: "bpf", options: bpfOptions(k.program, label, nl.TCA_BPF_FLAG_ACT_DIRECT),
	})
}

// bpfOptions returns the options of a filter that calls a program.
func bpfOptions(p *ebpf.Program, label string, flags uint32) (options []byte) {
	ne := binary.NativeEndian
	for typ, value := range map[int][]byte{
		nl.TCA_BPF_FD: ne.AppendUint32(nil, uint32(p.FD())), nl.TCA_BPF_NAME: nl.ZeroTerminated(label), nl.TCA_BPF_FLAGS: ne.AppendUint32(nil, flags),
	} {
		options = append(options, nl.NewRtAttr(typ, value).Serialize()...)
	}
	return options
}

// remove removes the filter, and the qdisc too if it was made for ours and has no other use.
func (k filterKnob) remove(d *Device, s situation, clsact bool) error {
	if err := k.drop(d, s.own); err != nil {
		return err
	}
	s.count -= len(s.own)
	if !clsact || s.count > 0 || s.kind != "clsact" {
		return nil
	}
	// The kernel cannot make the removal depend on whether the qdisc is empty: a filter added at
	// this moment goes with it.
	err := d.send(unix.RTM_DELQDISC, 0, message{handle: clsactHandle, parent: ingressParent})
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // it has gone already
		return fmt.Errorf("remove clsact: %w", err)
	}
	return nil
}

// drop removes filters at the knob's hook.
func (k filterKnob) drop(d *Device, list []filter) error {
	for _, f := range list {
		err := d.send(unix.RTM_DELTFILTER, 0, message{handle: f.handle, parent: k.parent(), info: filterInfo(f.pref), kind: "bpf"})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove filter: %w", err)
		}
	}
	return nil
}

// filterInfo returns tcm_info of a filter for packets of any protocol.
func filterInfo(pref uint16) uint32 {
	all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	return uint32(pref)<<16 | uint32(all)
}

// clsact returns the qdisc with the device's hooks: clsact, or the older ingress. Its kind is "" if
// there is none.
func (d *Device) clsact() (message, error) {
	list, err := d.all()
	return under(ingressParent, list), err
}

// filters lists the filters at a hook, or of a qdisc, as packets meet them. The kernel also lists each
// preference, with a handle of 0.
func (d *Device) filters(parent uint32) ([]filter, error) {
	list, err := d.dump(unix.RTM_GETTFILTER, message{parent: parent})
	if err != nil {
		return nil, err
	}
	var out []filter
	for _, m := range list {
		if m.handle == 0 && m.kind == "bpf" {
			continue
		}
		f := filter{message: m, pref: uint16(m.info >> 16)}
		if m.kind == "bpf" {
			f.label = unix.ByteSliceToString(valueOf(m.options, nl.TCA_BPF_NAME, 0))
			if id := valueOf(m.options, nl.TCA_BPF_ID, 4); id != nil {
				f.id = binary.NativeEndian.Uint32(id)
			}
		}
		out = append(out, f)
	}
	slices.SortStableFunc(out, func(f, g filter) int { return cmp.Compare(f.pref, g.pref) })
	return out, nil
}

var _ journal.Stepwise = filterKnob{}
