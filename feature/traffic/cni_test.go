package traffic_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// cniBandwidth has the CNI plugin bandwidth limit a container at the veth "hone", as a container
// runtime would, in both directions. It returns its IFB.
func (h *host) cniBandwidth(box *sandbox.Box, rate int) netdev.Link {
	h.t.Helper()
	const plugin = "/usr/lib/cni/bandwidth"
	if _, err := os.Stat(plugin); err != nil {
		testkit.Skip(h.t, "no CNI plugin bandwidth")
	}
	config := fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "fairlead-test", "type": "bandwidth",
		"ingressRate": %[1]d, "ingressBurst": %[1]d, "egressRate": %[1]d, "egressBurst": %[1]d,
		"prevResult": {"cniVersion": "0.4.0", "ips": [], "dns": {}, "interfaces": [{"name": "hone"}, {"name": "eth0", "sandbox": %[2]q}]}}`, rate, box.NetNS())
	cmd := exec.Command(plugin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID="+box.Name, "CNI_NETNS="+box.NetNS(), "CNI_IFNAME=eth0", "CNI_PATH=/usr/lib/cni")
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(config), &out, &out
	p, err := h.ns.Start(cmd)
	must(h.t, err)
	if err := p.Wait(); err != nil {
		h.t.Fatalf("%v: %s", err, &out)
	}
	links, err := h.Open(h.ns).Links(netdev.MostLinks)
	must(h.t, err)
	i := slices.IndexFunc(links, func(l netdev.Link) bool { return l.Kind == "ifb" })
	if i < 0 {
		h.t.Fatalf("the plugin made no IFB: %+v", links)
	}
	return links[i]
}

// Beside the CNI plugin bandwidth the stricter limit holds, in both directions, and explain names
// the plugin's where it holds.
func TestBesideCNIBandwidth(t *testing.T) {
	needSharing(t)
	h := newHost(t, gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	theirs := h.cniBandwidth(box, 10*mbit)
	h.start()
	before := h.state()
	is := func(due uint64, ifbs int, words ...string) {
		t.Helper()
		ceil := policy.Net{Ceil: due}
		must(t, h.due(c, ceil, ceil))
		testkit.Same(t, fmt.Sprintf("ceil %d: IFBs", due), ifbs, h.ifbs())
		var said []string
		for _, e := range h.traffic.Evidence(c.ID) {
			said = append(said, e.Text)
		}
		slices.Sort(said)
		if len(said) != len(words) {
			t.Fatalf("ceil %d: %q, want %q", due, said, words)
		}
		for i, w := range words {
			if !strings.Contains(said[i], w) {
				t.Errorf("ceil %d: %q, want %q", due, said[i], w)
			}
		}
	}
	changed := []string{"net.ceil: only the container's own devices", "net.ingress.ceil: only the container's own devices"}
	stays := []string{"net.ceil = 50mbit is held by somebody else's tbf of 10mbit at " + theirs.Name, "net.ingress.ceil = 50mbit is held by somebody else's tbf of 10mbit at hone"}
	is(50*mbit, 1, stays[0], changed[0], stays[1], changed[1])
	h.resolve(box, h.wire, "10.66.0.1:9000")
	passed := func() (n uint64) {
		h.Netlink(h.ns, func(k *netlink.Handle) error {
			l, err := k.LinkByIndex(theirs.Index)
			if err == nil {
				n = l.Attrs().Statistics.TxPackets
			}
			return err
		})
		return n
	}
	was := passed()
	h.send(box, "10.66.0.1:9000")
	if n := counted(passed, was, datagrams); n < datagrams {
		t.Errorf("of %d packets %d passed the plugin's queue", datagrams, n)
	}
	is(5*mbit, 2, changed...)
	must(t, h.traffic.Remove(t.Context(), c.ID))
	testkit.Same(t, "in the end", before, h.state())
}

// A program of a network plugin at what the host end receives decides about each packet, as Calico's
// and Cilium's do: it sees them all while the container has a ceil, and what it keeps from the
// ceil's queue is said.
func TestBesidePolicyPrograms(t *testing.T) {
	needSharing(t)
	for name, says := range map[string]string{"filter": "which packets would not meet", "tcx": "runs before", "tcx, later": "runs before"} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, gbit)
			h.bridge()
			box, c := h.add("one", "10.66.0.2/24", h.ns)
			seen, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
			must(t, err)
			defer seen.Close()
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "cil_from_cont", Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
				asm.LoadMapValue(asm.R1, seen.FD(), 0), asm.Mov.Imm(asm.R2, 1), asm.StoreXAdd(asm.R1, asm.R2, asm.DWord),
				asm.Mov.Imm(asm.R0, 0), asm.Return(), // TC_ACT_OK, TCX_PASS: no later program runs
			}})
			must(t, err)
			defer p.Close()
			index, ceil := h.Index(h.ns, "hone"), policy.Net{Ceil: 5 * mbit}
			h.start()
			before := h.state()
			if name == "tcx, later" {
				must(t, h.apply(c, ceil))
			}
			must(t, h.ns.Do(func() error {
				if name != "filter" {
					l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: ebpf.AttachTCXIngress})
					if err == nil {
						t.Cleanup(func() { l.Close() })
					}
					return err
				}
				at := netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
				return errors.Join(netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: at}), netlink.FilterAdd(&netlink.BpfFilter{
					FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 1, Handle: 1, Protocol: unix.ETH_P_ALL},
					Fd:          p.FD(), Name: "calico", DirectAction: true,
				}))
			}))
			count := func() (n uint64) {
				must(t, seen.Lookup(uint32(0), &n))
				return n
			}
			err = h.apply(c, ceil)
			testkit.Fails(t, "a ceil beside it", err, says)
			h.resolve(box, h.wire, "10.66.0.1:9000")
			was := count()
			h.send(box, "10.66.0.1:9000")
			if n := counted(count, was, datagrams); n < datagrams {
				t.Errorf("of %d packets it saw %d", datagrams, n)
			}
			h.removes(before, c.ID)
		})
	}
}
