package container

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	containers "github.com/containerd/containerd/api/services/containers/v1"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestPodman(t *testing.T) {
	t.Parallel()
	p := testkit.StartPodman(t)
	s := runSet(t, Config{}, Podman(p.Host), CgroupTree("/proc", ""))
	await(t, s, "the service", func(snap Snapshot) bool { return snap.Complete })
	p.Must(t, "run", "-d", "--name", "pod", "--cgroup-parent", "/"+p.CgroupParent, "--label", "fairlead.net.rate=5mbit", p.Image, "sleep", "1000")
	c := bySource(t, s, "podman", "pod", "podman0")
	if id := p.Must(t, "inspect", "-f", "{{.Id}} {{.State.Pid}}", "pod"); id != c.RuntimeID+" "+strconv.Itoa(c.PID) {
		t.Errorf("pod is %s, want %s %d", id, c.RuntimeID, c.PID)
	}
	if c.Image != p.Image || c.Labels["fairlead.net.rate"] != "5mbit" || !strings.Contains(filepath.Base(c.Cgroup.V2), c.RuntimeID) {
		t.Errorf("container %+v", c)
	}
	if len(c.Interfaces) != 1 || c.Interfaces[0].Kind != "veth" || c.Interfaces[0].Host.Master != "podman0" {
		t.Fatalf("interfaces %+v, want one with its end at podman0", c.Interfaces)
	}
	checkHostEnd(t, c.Interfaces[0])
	if err := unix.Kill(c.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitGone(t, s, "pod")
	p.Must(t, "wait", "pod") // Podman takes longer, and starts nothing that it thinks runs
	p.Must(t, "start", "pod")
	if again := bySource(t, s, "podman", "pod"); again.PID == c.PID || again.RuntimeID != c.RuntimeID {
		t.Errorf("started again: %+v, before %+v", again, c)
	}
	p.Must(t, "rm", "-f", "pod")
	awaitGone(t, s, "pod")
}

func TestContainerd(t *testing.T) {
	t.Parallel()
	d := testkit.StartContainerd(t)
	s := runSet(t, Config{}, Containerd(d.Socket))
	for _, space := range []string{"default", "moby", "k8s.io"} {
		d.Import(t, space)
	}
	d.Start(t, "default", "early", "--label", "a=b")
	early := bySource(t, s, "containerd", "early")
	if early.RuntimeID != "early" || early.Labels["a"] != "b" || early.Image != d.Image || filepath.Base(early.Cgroup.V2) != "early" {
		t.Errorf("container %+v", early)
	}
	d.Start(t, "moby", "dockers") // not ours to report
	// As the CRI plugin would: a sandbox, and a container that joins it.
	d.Start(t, "k8s.io", "sandbox", "--label", kindLabel+"=sandbox", "--label", podLabel+"=web-0", "--label", namespaceLabel+"=shop")
	pause := bySource(t, s, "containerd", "pause")
	d.Start(t, "k8s.io", "inner", "--with-ns", "network:/proc/"+strconv.Itoa(pause.PID)+"/ns/net",
		"--label", kindLabel+"=container", "--label", podLabel+"=web-0", "--label", namespaceLabel+"=shop", "--label", nameLabel+"=server")
	c := bySource(t, s, "containerd", "server")
	if c.Pod != "web-0" || c.Namespace != "shop" || c.RuntimeID != "inner" {
		t.Errorf("server: %+v", c)
	}
	if c.NetNS != pause.NetNS || c.ID == pause.ID || pause.Pod != "web-0" || pause.Labels[kindLabel] != "sandbox" {
		t.Errorf("server %+v and pause %+v, want one network", c, pause)
	}
	if _, ok := named(s.Snapshot(), "dockers"); ok {
		t.Error("a container of Docker's was reported")
	}

	// Processes that are put in come and go without a trace.
	if _, err := d.Run("default", "task", "exec", "--exec-id", "x1", "early", "true"); err != nil {
		t.Fatal(err)
	}
	if now := bySource(t, s, "containerd", "early"); !cmp.Equal(now, early) {
		t.Errorf("after an exec: %+v, before %+v", now, early)
	}
	if _, err := d.Run("default", "container", "label", "early", "a=c"); err != nil {
		t.Fatal(err)
	}
	await(t, s, "the new label", func(snap Snapshot) bool { c, ok := named(snap, "early"); return ok && c.Labels["a"] == "c" })
	if err := d.Remove("default", "early"); err != nil {
		t.Fatal(err)
	}
	awaitGone(t, s, "early")
}

func TestCRIRecord(t *testing.T) {
	sandboxData := `{"Version":"v1","Metadata":{"ID":"s1","Config":{"metadata":{"name":"web-0"},"annotations":{"fairlead.net.rate":"5mbit","both":"pod"}}}}`
	containerData := `{"Version":"v1","Metadata":{"ID":"c1","SandboxID":"s1","Config":{"annotations":{"both":"container","io.kubernetes.pod.name":"forged"}}}}`
	sandbox := &containers.Container{
		ID:         "s1",
		Labels:     map[string]string{kindLabel: "sandbox", podLabel: "web-0", namespaceLabel: "shop", "app": "web"},
		Extensions: map[string]*anypb.Any{sandboxMetadata: {Value: []byte(sandboxData)}},
	}
	inner := &containers.Container{
		ID: "c1", Image: "img",
		Labels:     map[string]string{kindLabel: "container", podLabel: "web-0", namespaceLabel: "shop", nameLabel: "server"},
		Extensions: map[string]*anypb.Any{containerMetadata: {Value: []byte(containerData)}},
	}
	for _, tc := range []struct {
		name    string
		ct, pod *containers.Container
		want    Record
	}{
		{"container of a pod", inner, sandbox, Record{
			Name: "server", RuntimeID: "c1", Image: "img", Pod: "web-0", Namespace: "shop",
			Labels: map[string]string{
				kindLabel: "container", podLabel: "web-0", namespaceLabel: "shop", nameLabel: "server",
				"app": "web", "both": "container", "fairlead.net.rate": "5mbit",
			},
		}},
		{"pause", sandbox, nil, Record{Name: "pause", RuntimeID: "s1", Pod: "web-0", Namespace: "shop", Labels: sandbox.Labels}},
		{"plain", &containers.Container{ID: "x", Labels: map[string]string{nerdctlName: "nice"}}, nil,
			Record{Name: "nice", RuntimeID: "x", Labels: map[string]string{nerdctlName: "nice"}}},
		{"broken metadata", &containers.Container{ID: "x", Extensions: map[string]*anypb.Any{containerMetadata: {Value: []byte("{")}, sandboxMetadata: nil}}, nil,
			Record{Name: "x", RuntimeID: "x", Labels: map[string]string{}}},
		{"nothing", nil, nil, Record{Labels: map[string]string{}}},
	} {
		if diff := cmp.Diff(tc.want, criRecord(tc.ct, tc.pod)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

func FuzzCRI(f *testing.F) {
	f.Add([]byte(`{"Version":"v1","Metadata":{"SandboxID":"s1","Config":{"annotations":{"a":"b"}}}}`))
	f.Add([]byte(`{"Metadata":{"Config":null}}`))
	f.Add([]byte(`{"Metadata":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := parseCRI(b)
		again, err := json.Marshal(struct{ Metadata criData }{got})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got, parseCRI(again), cmp.Transformer("len", func(m map[string]string) int { return len(m) })); diff != "" {
			t.Errorf("read again:\n%s", diff)
		}
	})
}
