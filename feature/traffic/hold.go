package traffic

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// hold is a queue that is wanted: of an uplink, of the host end of a veth, which sends what the
// container receives, or of an IFB, to which devices redirect what they receive or send. The holds
// of the uplinks and the tenants are the desired state of all qdiscs: put makes a device so, and
// what is watched, explained, reported and undone is read from them.
type hold struct {
	queue
	of      container.Device // has the queue, or names the IFB that has it
	path    string           // of its namespace
	program string           // redirects what is received to the IFB; empty: there is none
	sum     bool             // of an IFB for what devices send, below whose own roots filters redirect
	from    []int            // the devices that are redirected
	led     []int            // and those that may have a filter besides
	set     hook.Set         // programs that must not run without the queue
	sorter  *bpf.Copy        // fl_sort, of a ceil; it stays with the queue
	sorts   bpf.Vars         // its variables
	before  string           // programs of others that packets meet on the way to the IFB; empty: none
	why     error            // the plan is not in force
}

// newHold makes a hold with nothing in force. program and sum are as in hold.
func newHold(of container.Device, path, program string, sum bool) *hold {
	h := &hold{of: of, path: path, program: program, sum: sum}
	if !h.ifb() {
		h.index = of.Index
	}
	return h
}

// ifb reports whether the queue is that of an IFB. Its index is 0 while there is none.
func (h *hold) ifb() bool { return h.program != "" || h.sum }

// part ends the redirection to the IFB of a hold, and to one that has gone.
func (h *hold) part(ns *netdev.NS) error {
	return errors.Join(h.set.Close(), h.gather(ns, nil))
}

// gather redirects what the devices from send, and nothing else, to the IFB of a sum.
func (h *hold) gather(ns *netdev.NS, from []int) error {
	var errs []error
	for _, dev := range h.led {
		errs = append(errs, qdisc.Lead(ns, dev, h.index, slices.Contains(from, dev)))
	}
	return errors.Join(errs...)
}

// refs lists the knobs that put may have turned.
func (h *hold) refs(ns *netdev.NS) []journal.Ref {
	refs := h.knobs(ns)
	if h.ifb() {
		refs = append(refs, ns.IFB(h.of.Index, h.sum).Ref())
	}
	return refs
}

// all passes the holds of all uplinks and tenants.
func (f *Traffic) all() iter.Seq[*hold] {
	return func(yield func(*hold) bool) {
		for _, u := range f.uplinks {
			if !yield(u.out) || !yield(u.in) {
				return
			}
		}
		for _, t := range f.shaped {
			for _, h := range t.holds {
				if !yield(h) {
					return
				}
			}
		}
	}
}

// keep records why a hold is not in force, and returns it if a retry may mend it.
func (h *hold) keep(why error) error {
	if h.why = why; lasting(why) {
		return nil
	}
	return why
}

// put puts a plan in force, in the namespace of the hold.
func (f *Traffic) put(ns *netdev.NS, h *hold, p model.Plan, by journal.Owner) error {
	if h.ifb() {
		if err := f.beside(ns, h); errors.Is(err, errFiltered) {
			return errors.Join(err, f.take(ns, h))
		} else if err != nil {
			return err
		}
		if err := f.makeIFB(ns, h, by); err != nil {
			return err
		}
	}
	err := h.bring(f.cfg.Journal, ns, p, by, f.cfg.Now())
	switch {
	case err != nil && h.lost:
		return errors.Join(err, h.part(ns))
	case err != nil || !h.ifb():
		return err
	}
	return f.lead(ns, h)
}

// makeIFB makes the IFB of a hold, unless others remove it again and again.
func (f *Traffic) makeIFB(ns *netdev.NS, h *hold, by journal.Owner) error {
	ifb := netdev.IFBName(h.of.Index, h.sum)
	if h.index != 0 {
		index, err := ns.Index(ifb)
		if err != nil && !errors.Is(err, netdev.ErrNoLink) {
			return err
		}
		if index != h.index && !h.dispute.again(f.cfg.Now()) {
			return errors.Join(left("the IFB was removed"), h.part(ns))
		}
	}
	if err := f.cfg.Journal.Turn(ns.IFB(h.of.Index, h.sum), netdev.OurIFB, by); err != nil {
		return err
	}
	index, err := ns.Index(ifb)
	if err != nil || index == h.index {
		return err
	}
	err = h.part(ns)
	if h.index != 0 { // the last one was removed
		err = errors.Join(err, f.undo(h.knobs(ns)...))
	}
	h.index, h.claimed, h.lost, h.brought = index, false, false, false
	return err
}

// beside looks for programs of others where the devices of a hold receive. What an IFB hands back
// meets none that runs after ours (skb->tc_skip_classify): for filters, which do, nothing is led, and
// ours is attached anew behind programs by tcx.
func (f *Traffic) beside(ns *netdev.NS, h *hold) error {
	before := ""
	for _, dev := range h.from {
		s, err := f.cfg.Ends.Look(container.Device{NetNS: ns.Inode(), Index: dev}, h.path)
		if err != nil {
			return err
		}
		for _, p := range s.Ingress {
			if p.Ours {
				continue
			}
			if p.Kind == "tcx" {
				before += fmt.Sprintf("program %d ", p.Program)
			} else if to, err := qdisc.Redirected(ns, dev); err != nil || to == 0 {
				return cmp.Or(err, fmt.Errorf("%w (%s, program %d); possible with: its owner's own limit, or tcx in its place", errFiltered, p.Kind, p.Program))
			}
		}
	}
	if before == h.before {
		return nil
	}
	h.before = before
	return h.set.Close()
}

// lead redirects packets to the IFB of a hold.
func (f *Traffic) lead(ns *netdev.NS, h *hold) error {
	l, err := ns.Link(h.index)
	if err != nil {
		return err
	}
	if !l.Up {
		if !h.dispute.again(f.cfg.Now()) {
			return errors.Join(left("the IFB was set down"), h.part(ns))
		}
		if err := ns.RaiseIFB(h.of.Index, h.sum); err != nil {
			return err
		}
	}
	if h.sum {
		return h.gather(ns, h.from)
	}
	errs := []error{h.set.Drop(func(d container.Device, _ bool, _ string) bool { return !slices.Contains(h.from, d.Index) })}
	for _, dev := range h.from {
		place := hook.Place{
			Device: container.Device{NetNS: ns.Inode(), Index: dev}, Stage: hook.Ceil, Name: "inbound", Owner: journal.Owner{Feature: name},
		}
		errs = append(errs, h.set.PutCopy(f.cfg.Ends, place, f.programs.copyFor(h.program, trafficVarFlIfb, uint32(h.index))))
	}
	return errors.Join(errs...)
}

// take undoes put, also that of an earlier agent. Packets that wait in an IFB are delivered.
func (f *Traffic) take(ns *netdev.NS, h *hold) error {
	if h.index == 0 {
		index, err := ns.Index(netdev.IFBName(h.of.Index, h.sum))
		if err != nil && !errors.Is(err, netdev.ErrNoLink) {
			return errors.Join(err, h.set.Close())
		}
		h.index = index
	}
	errs := []error{h.part(ns)}
	if h.ifb() && h.live() {
		errs = append(errs, f.drain(ns, h.index, h.kind))
	}
	err := f.undo(h.refs(ns)...)
	if err == nil { // else the next call goes on
		errs = append(errs, h.unsort())
		h.queue = queue{link: h.link}
		if !h.ifb() {
			h.index = h.of.Index
		}
	}
	return errors.Join(append(errs, err)...)
}

// free is take, in a namespace that it opens. If that has gone, it drops all entries of it.
func (f *Traffic) free(h *hold) error {
	ns, err := f.find.Open(h.path, h.of.NetNS)
	if errors.Is(err, netdev.ErrNoNS) {
		prefix := fmt.Sprintf("%d/", h.of.NetNS)
		gone := func(journal.Ref) (journal.Knob, error) { return nil, journal.ErrGone }
		_, err = f.cfg.Journal.Restore(gone, func(e journal.Entry) bool {
			return e.Owner.Feature == name && strings.HasPrefix(e.Ref.Object, prefix)
		})
		err = errors.Join(err, h.unsort())
	}
	if ns == nil {
		return errors.Join(err, h.set.Close())
	}
	defer ns.Close()
	return f.take(ns, h)
}

// What fl_sort counts as sparse: a flow that takes little of the ceil.
const (
	sparsePart   = 16 // each such flow at most a sixteenth of the ceil
	sparseFrames = 2  // at once: a request, or a question and its repetition
	// The pause after which a flow of bulk is sparse again is as long as bulkPackets of the largest
	// size take, or longestPause. A queue rarely holds more: the kernel lets a TCP of this host have
	// two (TSQ).
	bulkPackets  = 16
	longestPause = 10 * time.Second
)

// sparse returns the variables of fl_sort for a ceil.
func sparse(l model.Link) bpf.Vars {
	took := func(bytes int, part uint64) uint64 { return uint64(bytes) * 8 * uint64(time.Second) * part / l.Rate }
	return bpf.Vars{
		trafficVarFlCost: took(64, sparsePart), trafficVarFlBurst: took(sparseFrames*l.MTU, sparsePart),
		trafficVarFlPause: min(took(bulkPackets*l.MaxPacket, 1), uint64(longestPause)),
	}
}

// sort lets fl_sort choose the class of each packet in the queue of a ceil.
func (f *Traffic) sort(ns *netdev.NS, h *hold) (err error) {
	vars := sparse(h.link)
	switch {
	case h.sorter == nil:
		h.sorter, err = f.programs.object.Copy(trafficProgFlSort, vars)
	case !maps.Equal(h.sorts, vars): // flows begin anew
		err = h.sorter.Set(vars)
	}
	if err != nil {
		return err
	}
	h.sorts = vars
	return qdisc.Sort(ns, h.index, h.sorter.Program)
}

// unsort closes fl_sort. Its queue has gone, or keeps it.
func (h *hold) unsort() error {
	c := h.sorter
	h.sorter = nil
	if c == nil {
		return nil
	}
	return c.Close()
}

// drain waits briefly until our root of a device, or some of its classes, are empty.
func (f *Traffic) drain(ns *netdev.NS, index int, kind qdisc.Kind, minors ...uint16) error {
	d, err := qdisc.Open(ns, index)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Drain(kind, minors...); err != nil && !errors.Is(err, journal.ErrGone) && !errors.Is(err, qdisc.ErrNotOurs) {
		return err
	}
	return nil
}
