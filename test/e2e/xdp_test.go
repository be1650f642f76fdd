package e2e

import (
	"fmt"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// TestXDPUplink drops packets in the driver of an uplink that the config file names, and checks
// that the agent reports it. The XDP program stays with the agent, whatever policy says meanwhile,
// and does not outlive the agent, whether stopped or killed.
func TestXDPUplink(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-xdp"})
	a := r.agent()
	before := r.state()
	program := func() (id uint32) {
		t.Helper()
		r.Change(r.host, "nic0", func(_ *netlink.Handle, l netlink.Link) error {
			if x := l.Attrs().Xdp; x != nil {
				id = x.ProgId
			}
			return nil
		})
		return id
	}
	drops := func(by string) {
		t.Helper()
		await(t, "nic0 to drop by "+by, func() error {
			n, err := a.api.NetCPU(t.Context(), "")
			if err != nil {
				return err
			}
			for _, u := range n.Uplinks {
				if u.Device == "nic0" && u.NetNS == r.inode && u.DropsBy == by && u.Why == "" && (program() != 0) == (by == "xdp") {
					return nil
				}
			}
			return fmt.Errorf("uplinks %+v, XDP program %d", n.Uplinks, program())
		})
	}
	gone := func(when string) {
		t.Helper()
		await(t, "the XDP program to go "+when, func() error {
			if id := program(); id != 0 {
				return fmt.Errorf("program %d is at nic0", id)
			}
			return nil
		})
	}

	a.start() // without that setting, by tc
	a.policy("xdp.yaml", "match: {name: e2e-xdp}\nset: {netcpu: isolate}\n")
	drops("tc")
	a.stop()

	must(t, os.WriteFile(a.path("config.yaml"), []byte("netcpu-xdp: eth0/1\n"), 0o644))
	mustSay(t, fairlead(t, "agent", "--config", a.path("config.yaml")), 1, "config.yaml:1: netcpu-xdp", `"eth0/1"`)
	must(t, os.WriteFile(a.path("config.yaml"), []byte("netcpu-xdp: nic0\n"), 0o644))
	a.start()
	drops("xdp")
	mustSay(t, a.run("netcpu", "--interval", "100ms"), 0, "DROPS BY")
	r.reachable("with XDP at the uplink")
	was := program()
	stays := func(when string) {
		t.Helper()
		drops("xdp")
		if id := program(); id != was {
			t.Errorf("%s: program %d in place of %d is at nic0", when, id, was)
		}
	}
	a.policy("xdp.yaml", "")
	await(t, "isolation to end", func() error {
		if groups := uplinkGroups(r.inode); len(groups) != 0 {
			return fmt.Errorf("%q are there", groups)
		}
		return nil
	})
	stays("without a policy")
	r.reachable("without a policy")

	a.policy("xdp.yaml", "match: {name: e2e-xdp}\nset: {netcpu: isolate}\n")
	a.isolated("e2e-xdp", 1)
	stays("with the policy again")
	a.kill()
	gone("with the agent")
	r.reachable("without an agent")
	a.start() // and takes over what is left
	drops("xdp")
	a.kill()
	mustSay(t, a.run("restore", "--state-dir", a.path("state")), 0, "")
	r.sameAs(before, "once the dead agent's changes are undone")
	a.start()
	drops("xdp")
	a.stop()
	gone("with a clean stop")
	r.sameAs(before, "after a clean stop")
}
