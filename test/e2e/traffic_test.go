package e2e

import (
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// uplink is a nic0 as the traffic feature may change it.
type uplink struct {
	t     *testing.T
	ns    *netdev.NS
	index int
}

// newUplink finds nic0 in a network namespace.
func newUplink(t *testing.T, path string) uplink {
	t.Helper()
	ns, index := device(t, path, "nic0")
	return uplink{t, ns, index}
}

// device opens a network namespace until the test ends, and finds a device there.
func device(t *testing.T, path, name string) (*netdev.NS, int) {
	t.Helper()
	ns, err := netdev.Open(path)
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	index, err := ns.Index(name)
	must(t, err)
	return ns, index
}

// shown returns what the feature may change on the host.
func (u uplink) shown() string {
	u.t.Helper()
	var out []string
	for _, k := range []journal.Knob{qdisc.Root(u.ns, u.index), qdisc.QueueLen(u.ns, u.index), qdisc.ForwardPriority("/proc", u.ns)} {
		v, err := k.Read()
		must(u.t, err)
		out = append(out, k.Ref().Kind+" "+v)
	}
	return strings.Join(out, "\n")
}

// rates returns the rates of the classes at the uplink, in Mbit/s, by minor.
func (u uplink) rates() string {
	u.t.Helper()
	var out []string
	must(u.t, u.ns.Do(func() error {
		l, err := netlink.LinkByIndex(u.index)
		if err != nil {
			return err
		}
		list, err := netlink.ClassList(l, 0)
		for _, c := range list {
			if c, ok := c.(*netlink.HtbClass); ok {
				out = append(out, fmt.Sprintf("%04x:%d", uint16(c.Handle), (c.Rate*8+500_000)/1_000_000))
			}
		}
		return err
	}))
	slices.Sort(out)
	return strings.Join(out, " ")
}

// journals returns the agent's journal and its copy, but none that was set aside.
func (a *agent) journals() (both []string) {
	a.t.Helper()
	for _, dir := range []string{a.path("state"), filepath.Join("/run/fairlead", url.PathEscape(a.path("state")))} {
		files, err := filepath.Glob(filepath.Join(dir, "journal-*[0-9a-f]"))
		must(a.t, err)
		both = append(both, files...)
	}
	return both
}

// TestTraffic makes the real agent divide an uplink: from labels and files to the kernel's classes
// and back, by a clean stop, and by a kill and a restore. Everything with our mark must go even if
// both copies of the journal were lost.
func TestTraffic(t *testing.T) {
	r := newRig(t)
	r.add(sandbox.Spec{Name: "e2e-rate", Labels: map[string]string{"fairlead.net.rate": "150mbit", "fairlead.net.ceil": "200mbit"}})
	r.add(sandbox.Spec{Name: "e2e-weight"})
	u := newUplink(t, r.host.NetNS())
	shared := func() state { // by all containers
		s := r.state()
		maps.DeleteFunc(s, func(k, _ string) bool {
			return !strings.HasPrefix(k, "host nic0 ") && !strings.Contains(k, uplinkGroup(r.inode))
		})
		s["qdiscs"] = regexp.MustCompile(`txqueuelen \d+`).ReplaceAllString(u.shown(), "") // has no mark
		return s
	}
	plain, before := shared(), u.shown()
	a := newAgent(t, r.host, "--sandbox-dir", r.Sandboxes.Dir(), "--uplink", "nic0=1gbit")
	lose := func() {
		both := a.journals()
		if len(both) != 2 {
			t.Errorf("the journals are %q", both)
		}
		for _, file := range both {
			must(t, os.Truncate(file, 0))
		}
	}
	a.policy("weight.yaml", "match: {name: e2e-weight}\nset: {net.weight: 3}\n")
	a.start()
	a.stands("e2e-rate", "traffic", api.StateDone)
	a.stands("e2e-weight", "traffic", api.StateDone)
	await(t, "the classes", func() error {
		got := u.rates()
		// 800 Mbit/s by weight, 1 to 3. Which container has which slot is random.
		if got != "0001:150 0002:600 fffe:1000 ffff:200" && got != "0001:600 0002:150 fffe:1000 ffff:200" {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
	r.reachable("shaped")
	o := a.run("traffic", "--interval", "200ms")
	if !regexp.MustCompile(`nic0, from containers, 1\.00Gbit; over (0\.[2-9]|[1-9][0-9]*\.[0-9]) s`).MatchString(o.out) { // not less
		t.Errorf("%v", o)
	}
	mustSay(t, o, 0, "e2e-rate    150mbit <=200mbit     150Mbit", "e2e-weight", "600Mbit", "(others)")
	// Its veth limits what it receives, and then has a table.
	mustSay(t, a.run("set", "e2e-rate", "net.ingress.ceil=100mbit"), 0, "fairlead.net.ingress.ceil = 100mbit (100.0 Mbit/s), set by uid 0")
	r.reachable("held back")
	mustSay(t, a.run("traffic", "e2e-rate", "--total"), 0, "h1, from containers, 200Mbit", "h1, to containers, 100Mbit", "<=100mbit", "nic0, from containers")
	mustSay(t, a.run("set", "e2e-rate", "net.ingress.ceil-"), 0, "fairlead.net.ingress.ceil = the link, by default")
	mustSay(t, a.run("traffic", "e2e-rate", "--total", "-o", "json"), 0, `"direction": "egress"`, `"rate_bits_per_second": 150000000`, `"sent_packets": `)
	if self := a.selfOf(r.boxes[0]); self.Traffic == nil || len(self.Traffic.Classes) != 2 || // of its ceil, and at the uplink
		self.Traffic.Classes[0].Name != "e2e-rate" || self.Traffic.Classes[0].Packets == 0 {
		t.Errorf("the container sees %+v", self.Traffic)
	}
	mustSay(t, a.run("explain", "e2e-rate"), 0, "fairlead.net.rate")

	a.policy("weight.yaml", "match: {name: e2e-weight}\nset: {net.rate: 800mbit}\n")
	a.stands("e2e-weight", "traffic", api.StateDone)
	a.stop()
	if got := u.shown(); got != before {
		t.Errorf("after a clean stop:\n%s\nwas\n%s", got, before)
	}

	a.policy("weight.yaml", "match: {name: e2e-weight}\nset: {net.rate: 800mbit, netcpu: isolate, netcpu.steal: 0%}\n")
	undone := func(when string) {
		t.Helper()
		await(t, when+", all to be as before", func() error { return shared().diff(plain) })
	}
	for _, lost := range []bool{false, true} {
		a.start()
		a.stands("e2e-weight", "traffic", api.StateDone)
		a.isolated("e2e-weight", 1)
		a.kill()
		if now := shared(); u.shown() == before || now["host nic0 threaded"] != "1" {
			t.Errorf("when the agent was killed: %v", now)
		}
		r.reachable("after the kill")
		if lost {
			lose()
		}
		restore := exec.Command(program, "restore", "--config", a.path("config.yaml"), "--state-dir", a.path("state"))
		there := func(c *exec.Cmd) error { return r.host.Do(c.Start) } // where marks are looked for
		mustSay(t, run(t, restore, there), 0, "qdisc", "threaded")
		undone("after kill and restore")
		if got := u.shown(); !lost && got != before {
			t.Errorf("after kill and restore:\n%s\nwas\n%s", got, before)
		}
	}

	a.start() // on what a killed one has left
	a.stands("e2e-weight", "traffic", api.StateDone)
	a.stands("e2e-weight", "netcpu", api.StateDone)
	a.kill()
	lose()
	a.policy("weight.yaml", "")
	a.start()
	a.stands("e2e-rate", "traffic", api.StateDone)
	await(t, "what the policy of yesterday left to go", func() error {
		if got := u.rates(); strings.Count(got, ":") != 3 {
			return fmt.Errorf("%s", got)
		}
		return nil
	})
	a.stop()
	undone("after adopting")
}
