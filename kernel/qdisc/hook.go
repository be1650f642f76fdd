package qdisc

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// Hook is a place on the path of a device's packets.
type Hook struct {
	NS    *netdev.NS
	Index int

	Egress bool // else ingress
	Stage  Stage
	// Name distinguishes our programs at one hook: lower-case letters, digits and underscores.
	Name string
}

// Stage is the position of a program among ours at one hook, below Stages: lower ones run first,
// whenever they were attached. Programs of one stage run in no particular order.
type Stage uint8

// Programs of the stages below Others run before the foreign ones at the hook, the rest after them.
const (
	Others Stage = 8
	Stages Stage = 16
)

// Hooks attaches programs to devices: by tcx links if the kernel has them (6.6), otherwise by
// filters of a clsact qdisc. Links keep the stages among the programs of one Hooks, filters among
// all of ours. Either way no packet is touched from the moment that the process ends, however it
// ends. A filter outlives the process, but it calls the program only through a map of programs,
// which the kernel empties when its last descriptor is closed. So nothing here is pinned, and no
// heartbeat is needed. Only a process that follows another may keep the other's links until it has
// attached its own programs ([Inherit]). The remaining filter costs a packet some nanoseconds until `fairlead
// restore`, or the next agent, removes it.
//
// A program returns the same values for both: -1 (TCX_NEXT, TC_ACT_UNSPEC) passes to the next one,
// 2 (TCX_DROP, TC_ACT_SHOT) drops.
type Hooks struct {
	journal *journal.Journal
	find    *netdev.Finder
	filters bool

	mu     sync.Mutex
	held   map[journal.Ref]*Attachment // by filters
	linked map[link.ID]linked          // by links

	inherited *Inherited // what no Attach has replaced yet; nil: nothing
}

// linked describes a link of ours.
type linked struct {
	stage Stage
	name  string
}

// OpenHooks probes whether the kernel has links or only filters. The error names what both lack.
// The journal j records the filters.
func OpenHooks(find *netdev.Finder, j *journal.Journal) (*Hooks, error) {
	p, err := program("fl_try", asm.Mov.Imm(asm.R0, next), asm.Return())
	if err != nil {
		return nil, fmt.Errorf("try programs at devices: %w", err)
	}
	defer p.Close()
	h := &Hooks{journal: j, find: find, held: make(map[journal.Ref]*Attachment), linked: make(map[link.ID]linked)}
	// No device has this index, so the error shows whether the kernel has tcx.
	_, err = link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: p, Attach: ebpf.AttachTCXIngress})
	if !errors.Is(err, ebpf.ErrNotSupported) {
		return h, nil
	}
	h.filters = true
	if err := tryFilter(p); err != nil {
		return nil, fmt.Errorf("kernel has no tcx (6.6), and filters of clsact do not work: %w", err)
	}
	return h, nil
}

// next is TCX_NEXT and TC_ACT_UNSPEC.
const next = -1

func program(name string, code ...asm.Instruction) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: code})
}

// tryFilter attaches a program to a scratch device.
func tryFilter(p *ebpf.Program) error {
	d, done, err := bench(1)
	if err != nil {
		return err
	}
	defer done()
	k := filterKnob{ns: d.ns, index: d.index, egress: true, name: "try", program: p}
	want, err := k.value()
	if err != nil {
		return err
	}
	if err := k.Write(want); err != nil {
		return err
	}
	if got, err := k.Read(); err != nil || got != want {
		return errors.Join(err, fmt.Errorf("it reads back as %q, not %q", got, want))
	}
	return nil
}

// Filters reports whether programs are attached by filters, because the kernel lacks tcx.
func (h *Hooks) Filters() bool { return h.filters }

// Attachment is a program at a Hook.
type Attachment struct {
	hooks *Hooks
	link  link.Link // a tcx link; nil: attached by a filter
	id    link.ID
	index int

	jump  *ebpf.Map // leads to the program
	knob  filterKnob
	ref   journal.Ref
	value string
	by    journal.Owner
}

// Attach attaches a program, on behalf of by. It replaces the program of this name that an earlier
// process left there. The caller may close the program and the namespace afterwards. Errors:
// journal.ErrGone if the device has gone.
func (h *Hooks) Attach(at Hook, p *ebpf.Program, by journal.Owner) (a *Attachment, err error) {
	if at.Stage >= Stages {
		return nil, fmt.Errorf("attach %s: there is no stage %d", at.Name, at.Stage)
	}
	if h.filters {
		a, err = h.filter(at, p, by)
	} else {
		err = at.NS.Do(func() error {
			a, err = h.link(at, p)
			return err
		})
		err = gone(err)
	}
	if err != nil {
		return nil, fmt.Errorf("attach %s to device %d in netns %d: %w", at.Name, at.Index, at.NS.Inode(), err)
	}
	return a, nil
}

// link attaches a program by tcx, inside the namespace.
func (h *Hooks) link(at Hook, p *ebpf.Program) (*Attachment, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o := link.TCXOptions{Interface: at.Index, Program: p, Attach: ebpf.AttachTCXIngress}
	if at.Egress {
		o.Attach = ebpf.AttachTCXEgress
	}
	there, err := link.QueryPrograms(link.QueryOptions{Target: at.Index, Attach: o.Attach})
	if err != nil {
		return nil, err
	}
	l, err := h.heir(there.Programs, at.Name, p)
	if err != nil {
		return nil, err
	}
	if l == nil {
		o.Anchor = h.anchor(there.Programs, at.Stage)
		if l, err = link.AttachTCX(o); err != nil {
			return nil, err
		}
	}
	info, err := l.Info()
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	h.linked[info.ID] = linked{at.Stage, at.Name}
	return &Attachment{hooks: h, link: l, id: info.ID, index: at.Index}, nil
}

// anchor returns the neighbour of a program of stage s among the programs at a hook, in their
// order. The program goes behind the last of ours that precedes it, or behind all foreign ones; or
// else in front of the first of ours that follows both.
func (h *Hooks) anchor(there []link.AttachedProgram, s Stage) link.Anchor {
	anchor := link.Head()
	if s >= Others {
		anchor = link.Tail()
		slices.Reverse(there)
	}
	for _, p := range there {
		id, _ := p.LinkID()
		of, ours := h.linked[id]
		switch {
		case !ours:
		case s < Others && of.stage <= s:
			anchor = link.AfterLinkByID(id)
		case s >= Others && of.stage > s:
			anchor = link.BeforeLinkByID(id)
		}
	}
	return anchor
}

// filter makes the map, the program that calls through it, and the filter that runs that.
func (h *Hooks) filter(at Hook, p *ebpf.Program, by journal.Owner) (_ *Attachment, err error) {
	a := &Attachment{hooks: h, index: at.Index, by: by}
	defer func() {
		if err != nil {
			a.forget()
		}
	}()
	a.jump, err = ebpf.NewMap(&ebpf.MapSpec{Name: "fl_jump", Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, err
	}
	if err = a.jump.Put(uint32(0), p); err != nil {
		return nil, err
	}
	stub, err := program("fl_call", // R1 is the packet already
		asm.LoadMapPtr(asm.R2, a.jump.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, next), // the map is empty
		asm.Return())
	if err != nil {
		return nil, err
	}
	a.knob = filterKnob{ns: at.NS, index: at.Index, egress: at.Egress, stage: at.Stage, name: at.Name, program: stub}
	if a.value, err = a.knob.value(); err != nil {
		return nil, err
	}
	a.ref = a.knob.Ref()
	if err = h.turn(a.knob, a.value, by); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held[a.ref] = a
	return a, nil
}

// turn attaches the filter. The kernel changes a queue length of 0 to 1000 whenever a device gets a
// qdisc, even one without a queue (net/sched/sch_api.c, qdisc_create). So before turn makes a
// clsact it records the length, and restores it afterwards.
func (h *Hooks) turn(k filterKnob, value string, by journal.Owner) (err error) {
	made := false
	err = root{k.ns, k.index}.do("look for clsact", func(d *Device) error {
		q, err := d.clsact()
		made = q.kind != ""
		return err
	})
	if err != nil {
		return err
	}
	length := QueueLen(k.ns, k.index)
	was, err := length.Read()
	if err != nil {
		return err
	}
	if !made && was == "0" {
		if err := h.journal.Turn(length, DefaultQueueLen, by); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.journal.Turn(length, was, by)) }()
	}
	return h.journal.Turn(k, value, by)
}

// Stray reports whether a journal entry is a filter without an Attachment of this process: a killed
// process left it.
func (h *Hooks) Stray(e journal.Entry) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return e.Ref.Kind == KindFilter && h.held[e.Ref] == nil
}

// Hold attaches the program again if its filter was removed. Errors: journal.ErrGone if the device
// has gone, even if another device has its index now and lacks the program, and if the link was
// detached.
func (a *Attachment) Hold() error {
	if a.link != nil {
		info, err := a.link.Info()
		if err != nil {
			return fmt.Errorf("look at program of device %d: %w", a.index, err)
		}
		if x := info.TCX(); x == nil || int(x.Ifindex) != a.index {
			return fmt.Errorf("program of device %d: %w", a.index, journal.ErrGone)
		}
		return nil
	}
	ns, err := a.hooks.find.Open("", a.knob.ns.Inode())
	if err != nil {
		return gone(err)
	}
	defer ns.Close()
	k := a.knob
	k.ns = ns
	return a.hooks.turn(k, a.value, a.by)
}

// Lost reports whether the program was detached, or its device has gone. It is always false for a
// filter, as netlink reports its removal.
func (a *Attachment) Lost() bool {
	return a.link != nil && errors.Is(a.Hold(), journal.ErrGone)
}

// Close detaches the program, unless a later Attach of the same name has replaced it. It never
// fails because the device has gone.
func (a *Attachment) Close() error {
	a.hooks.mu.Lock()
	if a.link != nil {
		defer a.hooks.mu.Unlock()
		if _, ok := a.hooks.linked[a.id]; !ok {
			return nil // closed before
		}
		delete(a.hooks.linked, a.id)
		return bpf.Unlink(a.link)
	}
	defer a.forget()
	if a.hooks.held[a.ref] == a {
		delete(a.hooks.held, a.ref)
	}
	a.hooks.mu.Unlock()
	open := func(r journal.Ref) (journal.Knob, error) { return OpenKnob("", a.hooks.find, r) }
	_, err := a.hooks.journal.Restore(open, func(e journal.Entry) bool { return e.Ref == a.ref && e.Wrote == a.value })
	return err
}

// forget closes the map, so that the filter calls no program.
func (a *Attachment) forget() {
	if a.jump != nil {
		a.jump.Close()
	}
	a.knob.program.Close()
}

// KindFilter is the journal's kind of a filter that calls a program.
const KindFilter = "tc-filter"

// Values of its knob besides "program ID".
const (
	noClsact = "no clsact" // no clsact, or only one that we made
	noFilter = "none"      // no filter of ours, in a clsact that was there before
)

// Ref implements journal.Knob: NETNS/DEVICE/HOOK/NAME.
func (k filterKnob) Ref() journal.Ref {
	return journal.Ref{Kind: KindFilter, Object: fmt.Sprintf("%d/%d/%s/%s", k.ns.Inode(), k.index, k.hook(), k.name)}
}
