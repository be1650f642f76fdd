package isolate

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// A container with its processes in a child of its cgroup, as with a systemd in it, can be frozen
// and thawed while its thread is in another child. The tree is that of v2 even if the cpu
// controller is in another.
func TestFrozenContainer(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	scratch := testkit.CG{V2: testkit.Cgroup(t).V2} // removed after the thread has left it
	is, ns, index, _ := bare(t)
	is.cfg.Layout = cgroup.Layout{Mode: cgroup.ModeV2, V2: is.cfg.Layout.V2, CPU: is.cfg.Layout.V2}
	scope := scratch.Child(t, "docker-0a.scope")
	process := testkit.NetNS(t).Start(t, "sleep", "1000").Process.Pid
	scope.Child(t, "init.scope").Add(t, process)
	must(t, ns.Offload(index, netdev.GRO).Write(netdev.GRO.On()))
	threads, err := is.threads(device{ns: ns, index: index, name: "fltb"}, is.owns(7))
	if err != nil || len(threads) != 1 {
		t.Fatalf("threads %v, %v", threads, err)
	}
	at := place{group: filepath.Join(scope.V2, "fairlead"), child: true}
	must(t, is.move(threads[0], at, is.owns(7)))
	freeze := func(value string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(scope.V2, "cgroup.freeze"), []byte(value), 0))
		testkit.Await(t, "cgroup.events follow cgroup.freeze", func() bool {
			events, err := os.ReadFile(filepath.Join(scope.V2, "cgroup.events"))
			must(t, err)
			return slices.Contains(strings.Split(string(events), "\n"), "frozen "+value)
		})
	}
	group := sched.Group("/proc", is.cfg.Layout, threads[0], is.cfg.Layout.CPU)
	for range 2 {
		freeze("1")
		if got, err := group.Read(); err != nil || got != at.group {
			t.Errorf("the thread is in %s, %v", got, err)
		}
		freeze("0")
	}
	must(t, is.undo(7))
	freeze("1")
	freeze("0")
	if left, _ := filepath.Glob(at.group); len(left) != 0 || slices.ContainsFunc(is.cfg.Journal.Entries(), func(e journal.Entry) bool { return e.Owner.Container == 7 }) {
		t.Errorf("left: %v, %+v", left, is.cfg.Journal.Entries())
	}
}
