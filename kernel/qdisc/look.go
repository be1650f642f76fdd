package qdisc

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// State is the state of a device.
type State struct {
	Root            string   // kind of the root qdisc; "" if the kernel does not show it
	Ingress, Egress []Hooked // in the order that packets pass them; at most 64 each
}

// Hooked is a program, or a filter of another kind, at a hook of a device.
type Hooked struct {
	Kind    string // "tcx", "netkit", or the kind of a filter: "bpf", "u32", ...; "block" for a block that devices share
	Program uint32 // id of the program, or of the one that calls it if ours is a filter; 0 if it is no program
	Ours    bool   // fairlead has attached it
	Stage   Stage  // if it is ours,
	Name    string // and the name of its Hook
}

const mostHooked = 64

// Look reads the state of a device. Errors: journal.ErrGone if the device has gone.
func (h *Hooks) Look(ns *netdev.NS, index int) (s State, err error) {
	err = root{ns, index}.do("look", func(d *Device) error {
		// A request for the root qdisc alone would notify all listeners (qdisc_get_notify).
		list, err := d.all()
		if err != nil {
			return err
		}
		s.Root = under(rootParent, list).kind
		if !h.filters {
			if err := ns.Do(func() error { return h.tcx(index, &s) }); err != nil {
				return err
			}
		}
		return d.hooked(under(ingressParent, list), &s)
	})
	s.Ingress, s.Egress = s.Ingress[:min(len(s.Ingress), mostHooked)], s.Egress[:min(len(s.Egress), mostHooked)]
	return s, err
}

// tcx lists the programs that the kernel runs before filters.
func (h *Hooks) tcx(index int, s *State) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, hook := range []struct {
		attach ebpf.AttachType
		kind   string
		list   *[]Hooked
	}{
		{ebpf.AttachTCXIngress, "tcx", &s.Ingress},
		{ebpf.AttachTCXEgress, "tcx", &s.Egress},
		// Of the outer end of a netkit: the programs for what it sends.
		{ebpf.AttachNetkitPrimary, "netkit", &s.Egress},
	} {
		there, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: hook.attach})
		if err != nil {
			if hook.kind == "netkit" {
				continue // no netkit, or the kernel has none
			}
			return err
		}
		for _, p := range there.Programs {
			id, _ := p.LinkID()
			of, ours := h.linked[id]
			*hook.list = append(*hook.list, Hooked{Kind: hook.kind, Program: uint32(p.ID), Ours: ours, Stage: of.stage, Name: of.name})
		}
	}
	return nil
}

// hooked adds the filters of q: clsact, or the older qdisc ingress.
func (d *Device) hooked(q message, s *State) error {
	if q.kind == "" {
		return nil
	}
	for parent, list := range map[uint32]*[]Hooked{hookIngress: &s.Ingress, hookEgress: &s.Egress} {
		if parent == hookEgress && q.kind != "clsact" {
			continue
		}
		if q.keep == sharesBlock {
			*list = append(*list, Hooked{Kind: "block"})
			continue
		}
		filters, err := d.filters(parent)
		if err != nil {
			return err
		}
		for _, f := range filters {
			hooked := Hooked{Kind: f.kind, Program: f.id}
			if name, _, ours := f.ours(); ours {
				hooked.Ours, hooked.Stage, hooked.Name = true, f.stage(), name
			}
			*list = append(*list, hooked)
		}
	}
	return nil
}
