package discover

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/google/go-cmp/cmp"
)

// TestSetBegins has a container that its runtime has created: it counts once its first process is there and
// has a network, and its start changes nothing.
func TestSetBegins(t *testing.T) {
	cg, ns, host := testkit.Cgroup(t), testkit.NetNS(t), testkit.NetNS(t)
	id := fmt.Sprintf("%064x", 1)
	at := cg.Child(t, id)
	must(t, ns.Do(func() error { // no news after the test's own
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
	}))
	testkit.Veth(t, ns, "eth0", host, "flh0")
	runtime, tree := newFake("docker"), newFake(container.CgroupSource)
	s := runSet(t, Config{NetNS: host.Path}, runtime, tree)
	runtime.report()
	tree.report()
	await(t, s, "both", func(snap Snapshot) bool { return snap.Complete })
	rec := Record{RuntimeID: id, Name: "web", Labels: map[string]string{"a": "b"}}
	runtime.publish(Report{Created: []Record{rec}})

	setsUp := ns.Start(t, "unshare", "--pid", "--fork", "--kill-child", "sleep", "1000") // as the runtime does, around its init
	at.Add(t, setsUp.Process.Pid)
	tree.report(Record{CgroupV2: at.V2})
	for pid := 0; pid == 0; rec.PID = pid {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", setsUp.Process.Pid))
		must(t, err)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	at.Add(t, rec.PID)
	if snap := s.Snapshot(); len(snap.Containers) > 0 {
		t.Errorf("without an address: %+v", snap.Containers)
	}
	ns.Address(t, "eth0", "10.219.0.2/24")
	c := awaitName(t, s, "web")
	if c.PID != rec.PID || c.Source != "docker" || c.Labels["a"] != "b" || c.Interfaces[0].Host.Name != "flh0" {
		t.Errorf("container %+v", c)
	}
	runtime.report(rec, Record{PID: sleeper(t, testkit.NetNS(t), cg.Child(t, "next")).Process.Pid, Name: "next"})
	awaitName(t, s, "next")
	if diff := cmp.Diff(c, awaitName(t, s, "web")); diff != "" {
		t.Errorf("the start changed it (-before +after):\n%s", diff)
	}
}
