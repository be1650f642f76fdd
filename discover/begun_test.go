package discover

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// beginning is a container in ns that a runtime sets up: the process in its cgroup has made the first one, which
// waits outside of it.
func beginning(t *testing.T, ns *testkit.NS) (rec Record, at testkit.CG) {
	rec = Record{RuntimeID: fmt.Sprintf("%064x", 1), Name: "web", Labels: map[string]string{"a": "b"}, Networks: 2}
	at = testkit.Cgroup(t).Child(t, rec.RuntimeID)
	must(t, ns.Do(func() error { // no address but the test's own
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
	}))
	setsUp := ns.Start(t, "unshare", "--pid", "--fork", "--kill-child", "sleep", "1000")
	at.Add(t, setsUp.Process.Pid)
	for pid := 0; pid == 0; rec.PID = pid {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", setsUp.Process.Pid))
		must(t, err)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	return rec, at
}

// TestSetBegins has a container that its runtime has created: it counts once its first process is there and
// has its networks, and its start changes nothing.
func TestSetBegins(t *testing.T) {
	ns, host := testkit.NetNS(t), testkit.NetNS(t)
	rec, at := beginning(t, ns)
	created := rec
	created.PID = 0
	runtime, tree := newFake("docker"), newFake(container.CgroupSource)
	s := runSet(t, Config{NetNS: host.Path}, runtime, tree)
	runtime.report()
	tree.report()
	await(t, s, "both", func(snap Snapshot) bool { return snap.Complete })
	runtime.publish(Report{Created: []Record{created}})
	tree.report(Record{CgroupV2: at.V2})
	at.Add(t, rec.PID)
	for i := range 2 {
		eth := fmt.Sprint("eth", i)
		testkit.Veth(t, ns, eth, host, "flh"+eth)
		if snap := s.Snapshot(); len(snap.Containers) > 0 {
			t.Errorf("with %d of 2 networks: %+v", i, snap.Containers)
		}
		ns.Address(t, eth, fmt.Sprintf("10.219.%d.2/24", i))
	}
	c := awaitName(t, s, "web")
	if c.PID != rec.PID || c.Source != "docker" || c.Labels["a"] != "b" || c.Interfaces[0].Host.Name != "flheth0" || len(c.Interfaces) != 2 {
		t.Errorf("container %+v", c)
	}
	runtime.report(rec, Record{PID: sleeper(t, testkit.NetNS(t), testkit.Cgroup(t)).Process.Pid, Name: "next"})
	awaitName(t, s, "next")
	testkit.Same(t, "the start changed it", c, awaitName(t, s, "web"))
}

// TestBegunNetworks has a container with two networks, of which its runtime gives it one: it does not count
// before its runtime has started it.
func TestBegunNetworks(t *testing.T) {
	layout, err := cgroup.Detect("/proc", cgroup.DefaultRoot)
	must(t, err)
	ns, host := testkit.NetNS(t), testkit.NetNS(t)
	r, err := newRounds(NewSet(Config{NetNS: host.Path}).cfg, layout, func() {})
	must(t, err)
	defer r.close()
	rec, at := beginning(t, ns)
	at.Add(t, rec.PID)
	testkit.Veth(t, ns, "eth0", host, "flh0")
	ns.Address(t, "eth0", "10.219.0.2/24")
	created := rec
	created.PID = 0
	runtime := reported{status: SourceStatus{Name: "docker", Listed: true}, created: []Record{created}}
	tree := reported{status: SourceStatus{Name: container.CgroupSource, Listed: true}, records: []Record{{CgroupV2: at.V2}}}
	r.run([]reported{runtime, tree}, true)
	if got := r.containers(); len(got) > 0 {
		t.Errorf("with one of two networks: %+v", got)
	}
	runtime.records, runtime.created = []Record{rec}, nil
	r.run([]reported{runtime, tree}, false)
	if got := r.containers(); len(got) != 1 {
		t.Errorf("started: %+v", got)
	}
}
