package agent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// TestUnexplained has containers of engines that no runtime reports.
func TestUnexplained(t *testing.T) {
	now := time.Now()
	in := func(id int, source, dir string, age time.Duration) container.Container {
		return container.Container{ID: container.ID(id), Source: source, Started: now.Add(-age), Cgroup: container.Cgroup{V2: fmt.Sprintf("/sys/fs/cgroup"+dir, id)}}
	}
	const user = "/user.slice/user-1000.slice/user@1000.service/user.slice/"
	list := []container.Container{
		in(1, "docker", "/system.slice/docker-%064x.scope", time.Hour),
		in(2, "cgroup", "/machine.slice/libpod-%064x.scope", time.Hour),
		in(3, "cgroup", "/machine.slice/libpod-%064x.scope", time.Second), // about to be reported
		in(4, "cgroup", user+"docker-%064x.scope", time.Hour),
		in(5, "cgroup", user+"docker-%064x.scope", time.Hour),
		in(6, "cgroup", "/x/crio-%064x", time.Hour),
		in(7, "cgroup", "/system.slice/run-%d.scope", time.Hour),
	}
	found := unexplained(list, now)
	want := map[discover.Engine]int{{Name: "podman"}: 1, {Name: "docker", User: 1000}: 2, {Name: "cri-o"}: 1}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Fatalf("engines (-want +got):\n%s", diff)
	}
	r := newRig(t)
	for i := range list {
		list[i].Name = fmt.Sprint(i)
	}
	r.set.says(false, list...)
	r.set.snap.Sources = []discover.SourceStatus{{Name: "docker", Listed: true}, {Name: "podman", Listed: true, Partial: true, Absent: true}, {Name: "cri-o", Listed: true, Partial: true, Absent: true}, {Name: container.CgroupSource, Listed: true}}
	r.start()
	st, err := r.client.Status(t.Context())
	testkit.Must(t, err)
	for i, says := range [][]string{
		{"2 containers of the rootless Docker of user 1000", "--docker-host=unix:///run/user/1000/docker.sock"},
		{"1 container of Podman", "systemctl enable --now podman.socket"},
		{"1 container of CRI-O", "--crio"},
	} {
		for _, text := range says {
			if got := st.Sources[i].Error; !strings.Contains(got, text) {
				t.Errorf("source %s says %q, want %q", st.Sources[i].Name, got, text)
			}
		}
	}
}

// TestDoctorEngines has a container of an engine that no runtime reports.
func TestDoctorEngines(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	in := cg.Child(t, fmt.Sprintf("crio-%064x.scope", 1))
	in.Add(t, ns.Start(t, "sleep", "1000").Process.Pid)
	r := withEngines(nil, Config{Roots: kernel.Default()})
	for _, f := range r {
		if f.Capability == "cri-o" && f.Level == probe.Degraded && strings.Contains(f.Why, "of CRI-O") && f.Mend != "" {
			return
		}
	}
	t.Errorf("report %+v", r)
}
