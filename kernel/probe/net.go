package probe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// trial is a network namespace of our own with a veth pair in it. The namespace has no name, so it
// goes with its descriptors, whatever happens to this process.
type trial struct {
	ns         *netdev.NS
	handle     *netlink.Handle
	send, recv netlink.Link
	cfg        Config
}

// network examines devices, qdiscs and the programs attached to them. group is a scratch cgroup
// with the cpu controller, or groupErr explains why there is none.
func network(ctx context.Context, cfg Config, l cgroup.Layout, group string, groupErr error) answers {
	a := make(answers)
	rest := []string{"veth", "napi-threaded", "napi-netlink", "kthread-cgroup", "qdisc-clsact", "qdisc-htb", "qdisc-hfsc", "qdisc-fq", "bpf-tc", "bpf-tcx", "bpf-xdp"}
	t, err := newTrial(cfg)
	if err != nil {
		a["netns"] = refused(err, "use a kernel with CONFIG_NET_NS")
		a.all(unavailable("no network namespace to try it in: "+a["netns"].Why, a["netns"].Mend), rest...)
		return a
	}
	defer t.close()
	a["netns"] = full("")
	if err := t.addVeth(); err != nil {
		a["veth"] = refused(err, "use a kernel with CONFIG_VETH, with its modules installed")
		a.all(unavailable("no veth to try it on: "+a["veth"].Why, a["veth"].Mend), rest[1:]...)
		return a
	}
	a["veth"] = full("")

	var thread *sched.Named
	for _, try := range []func(){
		func() { a["napi-threaded"], a["napi-netlink"], thread = t.threaded() },
		func() {
			switch {
			case thread == nil:
				a["kthread-cgroup"] = unavailable("no kernel thread of our own to try it on: "+a["napi-threaded"].Why, a["napi-threaded"].Mend)
			case groupErr != nil:
				a["kthread-cgroup"] = unavailable("no cgroup to try it in: "+reason(groupErr), "mount the cpu controller")
			default:
				a["kthread-cgroup"] = t.move(*thread, l, group)
			}
		},
		func() { a["qdisc-clsact"], a["bpf-tc"] = t.clsact() },
		func() { a["bpf-tcx"] = t.tcx() },
		func() { a["bpf-xdp"] = t.xdp() },
		func() { a["qdisc-htb"] = t.qdisc(netlink.NewHtb(t.root()), "CONFIG_NET_SCH_HTB") },
		func() { a["qdisc-hfsc"] = t.qdisc(netlink.NewHfsc(t.root()), "CONFIG_NET_SCH_HFSC") },
		func() {
			a["qdisc-fq"] = t.qdisc(&netlink.GenericQdisc{QdiscAttrs: t.root(), QdiscType: "fq"}, "CONFIG_NET_SCH_FQ")
		},
	} {
		if ctx.Err() != nil {
			break // a busy host: the report shows which questions have no answer
		}
		try()
	}
	return a
}

func newTrial(cfg Config) (*trial, error) {
	t := &trial{cfg: cfg}
	var err error
	if t.ns, err = netdev.New(); err != nil {
		return nil, err
	}
	err = t.ns.Do(func() (err error) {
		t.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// close removes the pair at once, and the thread with it. Then it closes the namespace.
func (t *trial) close() {
	if t.send != nil {
		t.handle.LinkDel(t.send) // else it goes with the namespace, later
	}
	if t.handle != nil {
		t.handle.Close()
	}
	t.ns.Close()
}

func (t *trial) addVeth() error {
	// A kernel thread is named after its device. The name distinguishes our thread from that of
	// another probe.
	name := fmt.Sprintf("fl%d", os.Getpid())
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name + "a", TxQLen: -1}, PeerName: name + "b"}
	if err := t.handle.LinkAdd(veth); err != nil {
		return fmt.Errorf("make a veth pair: %w", err)
	}
	t.send = veth
	peer, err := t.handle.LinkByName(veth.PeerName)
	if err != nil {
		return fmt.Errorf("veth %s: %w", veth.PeerName, err)
	}
	t.recv = peer
	for _, l := range []netlink.Link{t.send, t.recv} {
		if err := t.handle.LinkSetUp(l); err != nil {
			return fmt.Errorf("set veth %s up: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

func (t *trial) root() netlink.QdiscAttrs {
	return netlink.QdiscAttrs{LinkIndex: t.send.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
}

func (t *trial) qdisc(q netlink.Qdisc, config string) answer {
	err := t.handle.QdiscAdd(q)
	switch {
	case errors.Is(err, unix.ENOENT):
		return unavailable("this kernel has no "+q.Type(), "use a kernel with "+config+", with its modules installed")
	case err != nil:
		return refused(err, "")
	}
	if err := t.handle.QdiscDel(q); err != nil {
		return degraded("it can be made, but not removed: "+reason(err), "")
	}
	return full("")
}

// clsact tries the qdisc, and a program in one of its filters.
func (t *trial) clsact() (qdisc, program answer) {
	q := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: t.recv.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	qdisc = t.qdisc(q, "CONFIG_NET_CLS_ACT and CONFIG_NET_SCH_INGRESS")
	if qdisc.Level != Full {
		return qdisc, unavailable("there is no clsact to attach it to", qdisc.Mend)
	}
	p, err := ebpf.NewProgram(classifier(ebpf.SchedCLS))
	if err != nil {
		return qdisc, refused(loading(err), "the kernel must allow BPF programs for tc")
	}
	defer p.Close()
	if err := t.handle.QdiscAdd(q); err != nil {
		return qdisc, refused(err, "")
	}
	defer t.handle.QdiscDel(q)
	err = t.handle.FilterAdd(&netlink.BpfFilter{
		FilterAttrs:  netlink.FilterAttrs{LinkIndex: q.LinkIndex, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
		Fd:           p.FD(),
		Name:         progName,
		DirectAction: true,
	})
	if err != nil {
		return qdisc, refused(fmt.Errorf("add a filter: %w", err), "use a kernel with CONFIG_NET_CLS_BPF, with its modules installed")
	}
	return qdisc, full("")
}

func (t *trial) tcx() answer {
	const mend = "none is needed: programs are attached by filters of a clsact qdisc instead"
	return t.attach(ebpf.SchedCLS, mend, func(p *ebpf.Program) (link.Link, error) {
		return link.AttachTCX(link.TCXOptions{Interface: t.recv.Attrs().Index, Program: p, Attach: ebpf.AttachTCXIngress})
	})
}

func (t *trial) xdp() answer {
	const mend = "none is needed: tc drops the packets instead, which is later and costs more"
	return t.attach(ebpf.XDP, mend, func(p *ebpf.Program) (link.Link, error) {
		return link.AttachXDP(link.XDPOptions{Interface: t.recv.Attrs().Index, Program: p, Flags: link.XDPDriverMode})
	})
}

// attach loads a program and attaches it inside the namespace.
func (t *trial) attach(typ ebpf.ProgramType, mend string, fn func(*ebpf.Program) (link.Link, error)) answer {
	p, err := ebpf.NewProgram(classifier(typ))
	if err != nil {
		return refused(loading(err), mend)
	}
	defer p.Close()
	err = t.ns.Do(func() error {
		l, err := fn(p)
		if err != nil {
			return err
		}
		return l.Close()
	})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return unavailable("this kernel does not know it", mend)
	}
	if err != nil {
		return refused(fmt.Errorf("attach to a veth: %w", err), mend)
	}
	return full("")
}

// threaded makes the receiving end poll in a kernel thread, and looks for the thread by netlink and
// by its name.
func (t *trial) threaded() (threaded, byNetlink answer, thread *sched.Named) {
	const mend = "none is known"
	byNetlink = unavailable("there was no thread to look for", mend)
	index := t.recv.Attrs().Index
	for _, turn := range []struct {
		what  string
		write func() error
	}{
		{"switch GRO on at the receiving end", func() error { return t.ns.Offload(index, netdev.GRO).Write(netdev.GRO.On()) }},
		{"switch TSO off at the sending end", func() error {
			return t.ns.Offload(t.send.Attrs().Index, netdev.TSO).Write(netdev.Off)
		}},
		{"make NAPI threaded", func() error { return t.ns.Threaded(index).Write("1") }},
	} {
		if err := turn.write(); err != nil {
			return refused(fmt.Errorf("%s: %w", turn.what, err), mend), byNetlink, nil
		}
	}

	list, err := t.ns.NAPIs(index)
	byNetlink = full("")
	switch {
	case errors.Is(err, netdev.ErrNoNAPIList):
		byNetlink = unavailable("this kernel does not list its NAPI contexts (6.7 and later do)", "none is needed: threads are found by their names")
	case err != nil:
		byNetlink = refused(err, "none is needed: threads are found by their names")
	case len(list) == 0 || list[0].Thread == 0:
		byNetlink = degraded("the kernel's list of NAPI contexts does not show the thread", "none is needed: threads are found by their names")
	}

	found, err := sched.Threads(t.cfg.Roots.Proc, "napi/"+t.recv.Attrs().Name+"-")
	switch {
	case err != nil:
		return refused(fmt.Errorf("find the thread: %w", err), "run in the host's pid namespace"), byNetlink, nil
	case len(found) == 0:
		return unavailable("the kernel accepts the setting but makes no thread", "none is known"), byNetlink, nil
	}
	return full(found[0].Comm), byNetlink, &found[0]
}

// move puts the thread into the scratch cgroup and back.
func (t *trial) move(thread sched.Named, l cgroup.Layout, group string) answer {
	k := sched.Group(t.cfg.Roots.Proc, l, thread.Thread, l.CPU)
	before, err := k.Read()
	if err != nil {
		return refused(err, "")
	}
	defer k.Write(before) // else it goes with its device
	const mend = "the agent must be allowed to write to the cgroups of containers"
	if err := k.Write(group); err != nil {
		return refused(err, mend)
	}
	after, err := k.Read()
	if err != nil {
		return refused(err, "")
	}
	if after != group {
		return unavailable("the thread was moved to "+group+" and is found in "+after, mend)
	}
	return full(strings.TrimPrefix(l.CPU, t.cfg.Roots.Cgroup+"/"))
}
