package probe

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

func TestHooks(t *testing.T) {
	testkit.OnKernels(t)
	ns := testkit.NetNS(t)
	testkit.Veth(t, ns, "flo0", ns, "flo1")
	testkit.Veth(t, ns, "flo2", ns, "flo3")
	look := func() answers {
		a := answers{}
		must(t, ns.Do(func() error { hooks(t.Context(), a); return nil }))
		return a
	}
	for c, a := range look() {
		if a.Level != Full {
			t.Errorf("in a new namespace: %s: %+v", c, a)
		}
	}

	h := ns.Handle(t)
	index := func(name string) int {
		l, err := h.LinkByName(name)
		must(t, err)
		return l.Attrs().Index
	}
	program := func(typ ebpf.ProgramType, name string) *ebpf.Program {
		spec := classifier(typ)
		spec.Name = name
		p := testkit.Opened(ebpf.NewProgram(spec))(t)
		return p
	}
	attach := func(name string, p *ebpf.Program) {
		err := ns.Do(func() error {
			l, err := link.Link(nil), error(nil)
			if p.Type() == ebpf.XDP {
				l, err = link.AttachXDP(link.XDPOptions{Interface: index(name), Program: p})
			} else {
				l, err = link.AttachTCX(link.TCXOptions{Interface: index(name), Program: p, Attach: ebpf.AttachTCXEgress})
			}
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		})
		if err != nil {
			t.Fatalf("attach to %s: %v", name, err)
		}
	}
	attach("flo0", program(ebpf.XDP, "cil_xdp"))
	attach("flo2", program(ebpf.XDP, "fl_xdp"))
	tcx := look()["tcx-programs"].detail != "this kernel has no tcx"
	if tcx {
		attach("flo0", program(ebpf.SchedCLS, "cil_tcx"))
		attach("flo2", program(ebpf.SchedCLS, "fl_tcx"))
	}
	for i, name := range []string{"cil_tc", "fl_tc"} {
		at := index(fmt.Sprint("flo", 1+2*i))
		q := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: at, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
		must(t, h.QdiscAdd(q))
		f := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: at, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
			Fd:          program(ebpf.SchedCLS, name).FD(), Name: name, DirectAction: true,
		}
		must(t, h.FilterAdd(f))
	}
	htb := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index("flo3"), Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT})
	must(t, h.QdiscAdd(htb))

	// The agent's own qdiscs belong to no other owner: the one of a veth, and of an IFB.
	must(t, h.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: netdev.IFBName(7, false), TxQLen: -1}}))
	for _, name := range []string{"flo2", netdev.IFBName(7, false)} {
		ours := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index(name), Handle: qdisc.Handle, Parent: netlink.HANDLE_ROOT})
		must(t, h.QdiscAdd(ours))
	}

	want := map[string]string{"xdp-programs": "cil_xdp (flo0)", "tc-programs": "cil_tc (flo1)", "qdiscs": "htb (flo3)"}
	if tcx {
		want["tcx-programs"] = "cil_tcx (flo0)"
	}
	got := look()
	for c, detail := range want {
		if a := got[c]; a.Level != Degraded || a.detail != detail {
			t.Errorf("%s: %s, %q, want %q", c, a.Level, a.detail, detail)
		}
	}
}

func TestCNI(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		level Level
		says  string
	}{
		{"none", nil, Full, "cni/net.d"}, // as in a pod, which cannot tell
		{"bridge", map[string]string{"10-a.conf": `{"type":"bridge"}`}, Full, "bridge (10-a.conf)"},
		{"list", map[string]string{"10-a.conflist": `{"plugins":[{"type":"ptp"},{"type":"bandwidth"}]}`}, Degraded, "the bandwidth plugin puts a qdisc"},
		{"cilium", map[string]string{"05-cilium.conflist": `{"plugins":[{"type":"cilium-cni"}]}`}, Degraded, "cilium has programs"},
		{"garbage", map[string]string{"10-a.conf": "\xff{", "README": `{"type":"bridge"}`, "b.conf": `[1]`, "c.json": `{"type":3}`}, Full, "no plugin"},
	} {
		etc := t.TempDir()
		for n, text := range c.files {
			testkit.Write(t, filepath.Join(etc, "cni/net.d", n), text)
		}
		a := cni(Config{Etc: etc})
		if a.Level != c.level || !strings.Contains(a.Why+a.detail, c.says) {
			t.Errorf("%s: %s, %q, %q", c.name, a.Level, a.Why, a.detail)
		}
	}
}

func FuzzPlugins(f *testing.F) {
	f.Add([]byte(`{"type":"bridge"}`))
	f.Add([]byte(`{"name":"x","plugins":[{"type":"ptp"},{"type":"portmap"}]}`))
	f.Add([]byte(`{"plugins":[{"type":""}],"type":7}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, typ := range plugins(text) {
			if typ == "" || len(typ) >= 100 {
				t.Fatalf("%q gives %q", text, typ)
			}
		}
	})
}

func TestProcesses(t *testing.T) {
	proc := t.TempDir()
	for pid, comm := range map[int]string{10: "kubelet", 11: "koordlet", 12: "irqbalance", 13: "sh", 14: "fairlead", 15: "fairlead-x"} {
		testkit.Write(t, filepath.Join(proc, fmt.Sprint(pid), "comm"), comm+"\n")
	}
	testkit.Write(t, filepath.Join(proc, "kubelet", "comm"), "kubelet\n") // not a process directory
	a := answers{}
	processes(Config{Roots: kernel.Roots{Proc: proc}}, a)
	for c, want := range map[string]string{
		"cgroup-managers": "degraded koordlet (pid 11), kubelet (pid 10)",
		"irqbalance":      "degraded irqbalance (pid 12)",
		"fairlead-agents": "full fairlead (pid 14)",
	} {
		testkit.Same(t, c, want, fmt.Sprintf("%s %s", a[c].Level, a[c].detail))
	}
	a = answers{}
	processes(Config{Roots: kernel.Roots{Proc: t.TempDir()}}, a)
	for c, v := range a {
		if v.Level != Full {
			t.Errorf("%s: %+v", c, v)
		}
	}
	if len(a) != 3 {
		t.Errorf("answers: %v", a)
	}
}

func TestCrowd(t *testing.T) {
	c := crowd{}
	for i := range 8 {
		c.add("b", fmt.Sprint("d", i))
	}
	c.add("a", "x")
	testkit.Same(t, "crowd", "a (x), b (d0 d1 d2 d3 d4 and 3 more)", c.String())
}
