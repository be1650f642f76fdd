package rig

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
)

// needEngine skips a test that cannot have a Docker Engine.
func needEngine(t *testing.T) {
	t.Helper()
	testkit.NeedRoot(t)
	for _, program := range []string{"dockerd", "docker", "iptables"} {
		if _, err := exec.LookPath(program); err != nil {
			testkit.Skip(t, "no "+program)
		}
	}
	if EngineRuns() != nil {
		testkit.Skip(t, "the test program is not static: CGO_ENABLED=0 go test")
	}
}

func TestDocker(t *testing.T) {
	needEngine(t)
	r, err := New(t.Context(), Config{Path: Docker, Containers: Pair(60, 30)})
	must(t, err)
	dir := r.engine.dir
	groups := r.Neighbours()[0].Cgroups()
	t.Cleanup(func() {
		testkit.Check(t, r.Close())
		for _, path := range append(groups, dir, r.Sandboxes.Dir()) {
			if _, err := os.Stat(path); err == nil {
				t.Errorf("%s is left", path)
			}
		}
	})
	// The generators run in the containers' cgroups, with their limits.
	self, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	for _, kind := range []Kind{UDP, TCP} {
		run, err := r.Send(t.Context(), Traffic{Kind: kind, Out: true})
		must(t, err)
		send, recv := run.Senders[0], run.Receivers[0]
		inside, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(send.PID), "cgroup"))
		if err != nil || string(inside) == string(self) || !strings.Contains(string(inside), "0::/flsandbox-") {
			t.Errorf("sender's cgroups (%v):\n%s", err, inside)
		}
		run.SetRate(load.Flood)
		if !moves(send) || !moves(recv) {
			t.Errorf("%s: nothing sent, or nothing received", kind)
		}
		testkit.Check(t, run.Stop())
	}
	out, err := r.engine.run(t.Context(), nil, "inspect", "--format", "{{.HostConfig.CpuQuota}} {{.HostConfig.CpusetCpus}}", r.Victim().Name)
	if err != nil || out != "60000 0" {
		t.Errorf("victim has quota and CPUs %q (%v)", out, err)
	}
	testkit.Fails(t, "two containers have one name", testkit.Err(r.engine.container(t.Context(), r.Victim().Name)))
}
