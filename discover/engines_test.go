package discover

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestEngineOf(t *testing.T) {
	id := strings.Repeat("0a", 32)
	for _, tc := range []struct {
		dir  string
		want Engine
	}{
		{"/system.slice/docker-" + id + ".scope", Engine{Name: "docker"}},
		{"/docker/" + id, Engine{Name: "docker"}},
		{"/machine.slice/libpod-" + id + ".scope", Engine{Name: "podman"}},
		{"/libpod_parent/libpod-" + id, Engine{Name: "podman"}},
		{"/kubepods.slice/kubepods-pod1.slice/crio-" + id + ".scope", Engine{Name: "cri-o"}},
		{"/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + id + ".scope", Engine{Name: "containerd"}},
		{"/kubepods/burstable/pod1/" + id, Engine{Name: "containerd"}},
		{"/system.slice/nerdctl-" + id + ".scope", Engine{Name: "containerd"}},
		{"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + id + ".scope/container", Engine{Name: "podman", User: 1000}},
		{"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-" + id + ".scope", Engine{Name: "docker", User: 1000}},
		{"/machine.slice/libpod-conmon-" + id + ".scope", Engine{}},
		{"/system.slice/docker.service", Engine{}},
		{"/docker/" + id[1:], Engine{}},
		{"/x/" + id, Engine{}},
		{"", Engine{}},
	} {
		if got, ok := EngineOf(tc.dir); ok != (tc.want != Engine{}) || ok && got != tc.want {
			t.Errorf("%s: %+v, %v", tc.dir, got, ok)
		}
	}
}

func TestEngines(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	before, err := Engines("/proc", "")
	must(t, err)
	name := fmt.Sprintf("crio-%064x.scope", 1)
	sleeper(t, ns, cg.Child(t, name))
	cg.Child(t, fmt.Sprintf("crio-%064x.scope", 2)) // without processes
	after, err := Engines("/proc", "")
	must(t, err)
	if e := (Engine{Name: "cri-o"}); after[e] != before[e]+1 {
		t.Errorf("%v, before %v", after, before)
	}
}

// TestContainerdPlaces joins what one runtime says in several places.
func TestContainerdPlaces(t *testing.T) {
	a, b := newFake("containerd"), newFake("containerd")
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	record := func(name string) Record {
		return Record{PID: sleeper(t, ns, cg.Child(t, name)).Process.Pid, Name: name, RuntimeID: name}
	}
	s := runSet(t, Config{NetNS: ns.Path}, places{a, b})
	a.say(Report{Partial: true, Absent: true})
	await(t, s, "a report of one", func(snap Snapshot) bool { st := snap.Sources[0]; return st.Partial && !st.Absent })
	b.say(Report{Partial: true, Absent: true})
	await(t, s, "both absent", func(snap Snapshot) bool { return snap.Sources[0].Absent })
	one, two := record("one"), record("two")
	a.say(Report{Records: []Record{one}})
	await(t, s, "one there", func(snap Snapshot) bool {
		st := snap.Sources[0]
		return cmp.Equal(snap.names(), map[string]bool{"one": true}) && !st.Partial && !st.Absent
	})
	b.say(Report{Records: []Record{two}})
	awaitNames(t, s, "both", "one", "two")
	a.say(Report{Err: errors.New("connection lost")})
	await(t, s, "one lost", func(snap Snapshot) bool { st := snap.Sources[0]; return st.Err != nil && len(snap.Containers) == 2 })
	b.say(Report{})
	awaitNames(t, s, "nothing in the other", "one", "two") // two's process lives, and the report is partial
	a.say(Report{Records: []Record{one}})
	awaitNames(t, s, "the whole", "one")
}
