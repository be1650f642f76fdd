package traffic

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic/model"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/policy"
)

// hold is a wanted queue: of an uplink; of the host end of a veth, which sends what the container
// receives; or of an IFB, to which devices redirect what they receive or send. The holds of the uplinks
// and the tenants are the desired state of all qdiscs. put brings a device to that state. Watches,
// status, reports and removal all work from the holds.
type hold struct {
	queue
	of      container.Device // the device with the queue, or after which its IFB is named
	path    string           // of the device's namespace
	program string           // redirects received packets to the IFB; empty: none
	sum     bool             // the IFB takes what devices send; filters below the devices' own roots redirect to it
	from    []int            // the devices to redirect
	led     []int            // these, and others that may still have a filter
	set     hook.Set         // programs that must not run without the queue
	sorter  *bpf.Copy        // fl_sort, of a ceil; it stays with the queue
	sorts   bpf.Vars         // its variables
	before  string           // other software's programs that packets pass before the IFB; empty: none
	why     error            // why the plan is not in force
}

// newHold returns a hold with nothing in force. program and sum are as in hold.
func newHold(of container.Device, path, program string, sum bool) *hold {
	h := &hold{of: of, path: path, program: program, sum: sum}
	if !h.ifb() {
		h.index = of.Index
	}
	return h
}

// ifb reports whether the queue belongs to an IFB. Its index is 0 while the IFB does not exist.
func (h *hold) ifb() bool { return h.program != "" || h.sum }

// part ends the redirection to the IFB of a hold, or to one that was removed.
func (h *hold) part(ns *netdev.NS) error {
	return errors.Join(h.set.Close(), h.gather(ns, nil))
}

// gather redirects what the devices in from send to the IFB of a sum, and ends all other redirection.
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

// all iterates over the holds of all uplinks and tenants.
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

// keep records why a hold is not in force. It returns the error if a retry may help.
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

// makeIFB makes the IFB of a hold, unless other software keeps removing it.
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
	if h.index != 0 { // the previous one was removed
		err = errors.Join(err, f.undo(h.knobs(ns)...))
	}
	h.index, h.claimed, h.lost, h.brought = index, false, false, false
	return err
}

// beside looks for other programs on the devices of a hold. A packet that returns from an IFB skips
// every program after ours (skb->tc_skip_classify). So nothing is redirected past filters, which run
// after ours, and ours is attached anew behind tcx programs.
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

// take undoes put, including that of an earlier agent. Packets that wait in an IFB are delivered.
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
	if err == nil { // else the next call continues
		errs = append(errs, h.unsort())
		h.queue = queue{link: h.link}
		if !h.ifb() {
			h.index = h.of.Index
		}
	}
	return errors.Join(append(errs, err)...)
}

// free opens the namespace and calls take. If the namespace has gone, it drops all its entries.
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

// drain waits briefly until our root qdisc of a device, or some of its classes, are empty.
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

// ways lists the devices that carry a tenant's packets.
type ways struct {
	veths  []string // host ends, which see all packets
	below  []string // devices that bypass all other host devices on the way to an uplink
	beside []string // devices with packets that no host device sees
}

// ways sorts the tenant's devices. A device that was made in the container's namespace on top of
// another one leads nowhere by itself.
func (t *shaped) ways() (w ways) {
	if t.Key().NetNS == 0 {
		return ways{below: []string{"the host's network"}}
	}
	var inner []string
	for _, e := range t.Ends() {
		dev := e.Inside
		named := fmt.Sprintf("%s (%s)", dev.Name, dev.Kind)
		switch {
		case dev.HasHostEnd():
			w.veths = append(w.veths, e.Name)
		case dev.Kind == "veth": // see devices
		case unseen(dev.Kind):
			w.below = append(w.below, named)
		case dev.Kind == "device":
			w.beside = append(w.beside, dev.Name+" (hardware)")
		case dev.Apart || dev.Kind == "netkit":
			w.beside = append(w.beside, named)
		default:
			inner = append(inner, named)
		}
	}
	if len(w.veths)+len(w.below)+len(w.beside) == 0 {
		w.beside = inner
	}
	for _, list := range [][]string{w.veths, w.below, w.beside} {
		slices.Sort(list)
	}
	return w
}

// account separates the part of a tenant's due that holds from the part that does not.
type account struct {
	holds bool // at least a part of it
	gaps  []error
}

func (a *account) gap(format string, args ...any) {
	a.gaps = append(a.gaps, fmt.Errorf(format, args...))
}

// beside adds a gap if another program may keep packets from the queue of a hold.
func (a *account) beside(h *hold, keys string) {
	if h.before != "" {
		a.gap("%s: %s holds for what %sof somebody else passes on, which runs before (tcx); possible with: its owner's own limit", h.link.Name, keys, h.before)
	}
}

// unkept returns an error for the part of a tenant's due that does not hold. The error is a
// feature.ErrPartly if any part holds. missing lists uplinks that do not exist.
func (f *Traffic) unkept(t *shaped, missing []string) error {
	var a account
	w := t.ways()
	switch {
	case len(w.veths)+len(w.below)+len(w.beside) == 0:
		return errors.New("the container has no network device, so that there is nothing to hold; possible with: a network")
	case len(w.beside) > 0:
		a.gap("what passes %s comes to no device of the host at which it could be held; possible with: a bridge network or a macvlan", strings.Join(w.beside, ", "))
	}
	if len(w.veths)+len(w.below) > 0 {
		for _, way := range directions() {
			f.unkeptWay(&a, t, w, way, missing)
		}
	}
	if len(a.gaps) == 0 {
		return nil
	}
	if a.holds {
		return fmt.Errorf("%w: %w", feature.ErrPartly, errors.Join(a.gaps...))
	}
	return errors.Join(a.gaps...)
}

// wishes lists the keys that a policy sets.
func wishes(n policy.Net) (keys []string) {
	for _, k := range []struct {
		name string
		set  bool
	}{{"rate", n.Rate > 0}, {"ceil", n.Ceil > 0}, {"weight", n.Weight > 0}, {"priority", n.Priority != nil}, {"latency", n.Latency > 0}} {
		if k.set {
			keys = append(keys, k.name)
		}
	}
	return keys
}

// unkeptWay adds the gaps of one direction.
func (f *Traffic) unkeptWay(a *account, t *shaped, w ways, way Direction, missing []string) {
	n, prefix := t.due[way], way.prefix()
	keys := wishes(n)
	if n.Ceil > 0 && len(w.veths) > 0 && !f.atUplinks(way) {
		t.unkeptCeil(a, way)
		if len(w.below) == 0 { // the ceil needs no uplink then
			keys = slices.DeleteFunc(keys, func(k string) bool { return k == "ceil" })
		}
	}
	if len(keys) == 0 {
		return
	}
	for _, name := range missing {
		a.gap("there is no uplink %s", name)
	}
	if len(f.uplinks) == 0 && len(missing) == 0 {
		a.gap("%s %s not kept: the host has no uplink: no hardware is up (the agent's flag --uplink names others)", listed(prefix, keys), are(keys))
	}
	var holding []string
	for _, index := range slices.Sorted(maps.Keys(f.uplinks)) {
		u := f.uplinks[index]
		link := u.hold(way).link
		if err := u.unheld(way); err != nil {
			a.gap("uplink %s: %s %s not kept: %w", link.Name, listed(prefix, keys), are(keys), err)
			continue
		}
		holding = append(holding, link.Name)
		a.beside(u.hold(way), listed(prefix, keys))
		unkept := link.Unkept(keys)
		a.holds = a.holds || len(unkept) < len(keys)
		if len(unkept) > 0 {
			a.gap("uplink %s: %s %s not kept, as the rate of the link is not known: its driver does not tell ("+giveRate+")",
				link.Name, listed(prefix, unkept), are(unkept), link.Name)
		}
	}
	if slices.Contains(keys, "ceil") && len(holding) > 0 {
		f.aside(a, w, prefix+"ceil", holding)
	}
}

// holding lists the holds of a tenant's ceil in one direction.
func (t *shaped) holding(way Direction) (list []*hold) {
	for at, h := range t.holds {
		if at.way == way {
			list = append(list, h)
		}
	}
	slices.SortFunc(list, func(a, b *hold) int { return strings.Compare(a.link.Name, b.link.Name) })
	return list
}

// summed reports whether packets of a hold also pass the tenant's hold for the sum.
func (t *shaped) summed(h *hold) bool {
	for at, s := range t.holds {
		if at.sum && at.NetNS == h.of.NetNS && s.why == nil && !h.ifb() && slices.Contains(s.from, h.of.Index) {
			return true
		}
	}
	return false
}

// unkeptCeil adds the gaps of a ceil at veths, in one direction.
func (t *shaped) unkeptCeil(a *account, way Direction) {
	key := way.prefix() + "ceil"
	var holding []string
	for _, h := range t.holding(way) {
		if h.why != nil {
			a.gap("%s%s: %s is not kept: %w", h.link.Name, map[bool]string{true: " and others together"}[h.sum], key, h.why)
			continue
		}
		a.holds = true
		a.beside(h, key)
		if !t.summed(h) {
			holding = append(holding, h.link.Name)
		}
	}
	if len(holding) > 1 {
		a.gap("%s holds for each of %s, not for their sum; possible with: a single network, or a ceil divided by their number", key, strings.Join(holding, ", "))
	}
}

// aside adds the gaps of a ceil that uplinks enforce because there is no veth.
func (f *Traffic) aside(a *account, w ways, key string, holding []string) {
	where := "uplink " + holding[0]
	if len(holding) > 1 {
		where = fmt.Sprintf("each of the uplinks %s, not for their sum", strings.Join(holding, ", "))
	}
	switch {
	case len(w.below) > 0:
		a.gap("%s holds for what passes %s, and not for what stays on this host, as there is no veth for %s; possible with: a bridge network", key, where, strings.Join(w.below, ", "))
	case len(w.beside) == 0:
		a.gap("%s holds for what passes %s, and not for what stays on this host; possible with: Linux 6.6 or later", key, where)
	}
}

// listed formats policy keys.
func listed(prefix string, keys []string) string { return prefix + strings.Join(keys, ", "+prefix) }

func are(keys []string) string {
	if len(keys) > 1 {
		return "are"
	}
	return "is"
}

// Evidence implements feature.Witness: it says what enforces a container's due: the uplinks, its own
// devices alone, or a foreign qdisc that is as strict as its ceil.
func (f *Traffic) Evidence(id container.ID) (out []api.Evidence) {
	f.mu.Lock()
	defer f.mu.Unlock()
	say := func(format string, args ...any) {
		out = append(out, api.Evidence{Feature: name, Time: f.cfg.Now(), Text: fmt.Sprintf(format, args...)})
	}
	for _, t := range f.shaped {
		if !slices.Contains(t.IDs(), id) {
			continue
		}
		for _, way := range directions() {
			n, prefix := t.due[way], way.prefix()
			for _, h := range t.holding(way) {
				if h.theirs != "" {
					say("%sceil = %s is held by somebody else's %s, which is left in place", prefix, policy.FormatRate(n.Ceil), h.theirs)
				}
			}
			if f.needs(t, way) {
				say("%s: the uplinks have classes for it", listed(prefix, wishes(n)))
			} else if n.Ceil > 0 {
				say("%sceil: only the container's own devices were changed for it", prefix)
			}
		}
	}
	return out
}
