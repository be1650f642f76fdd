package discover

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"testing"

	containers "github.com/containerd/containerd/api/services/containers/v1"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestContainerd(t *testing.T) {
	t.Parallel()
	d := testkit.StartContainerd(t)
	s := runSet(t, Config{}, Containerd(d.Socket))
	for _, space := range []string{"default", "moby", "k8s.io"} {
		d.Import(t, space)
	}
	d.Start(t, "default", "early", "--label", "a=b", "--label", "given=otherwise")
	early := bySource(t, s, "containerd", "early")
	if early.RuntimeID != "early" || early.Labels["a"] != "b" || early.Image != d.Image || filepath.Base(early.Cgroup.V2) != "early" {
		t.Errorf("container %+v", early)
	}
	if diff := cmp.Diff(map[string]string{"from": "image"}, early.ImageLabels); diff != "" || early.Labels["given"] != "otherwise" {
		t.Errorf("labels %v, of the image (-want +got):\n%s", early.Labels, diff)
	}
	d.Start(t, "moby", "dockers") // not ours to report
	// As the CRI plugin would: a sandbox, and a container that joins it.
	d.Start(t, "k8s.io", "s1", "--label", kindLabel+"=sandbox")
	extend(t, d, "s1", sandboxMetadata, sandboxData)
	d.Start(t, "k8s.io", "c1", "--with-ns", "network:/proc/"+strconv.Itoa(early.PID)+"/ns/net", "--label", podLabel+"=other")
	extend(t, d, "c1", containerMetadata, containerData)
	c := bySource(t, s, "containerd", "shop/web-0/server")
	if c.Pod != "web-0" || c.Namespace != "shop" || c.RuntimeID != "c1" || c.Labels[podLabel] != "web-0" || c.ImageLabels[podLabel] != "other" {
		t.Errorf("server: %+v", c)
	}
	if c.NetNS != early.NetNS || c.ID == early.ID {
		t.Errorf("server %+v and early %+v, want one network", c, early)
	}
	for _, c := range s.Snapshot().Containers {
		if filepath.Base(c.Cgroup.V2) == "s1" {
			t.Errorf("the sandbox is a container: %+v", c)
		}
	}
	if c.PodCgroup {
		t.Errorf("the parent of %s is no pod's", c.Cgroup.V2)
	}
	if _, ok := named(s.Snapshot(), "dockers"); ok {
		t.Error("a container of Docker's was reported")
	}

	// Processes that are put in come and go without a trace.
	must(t, testkit.Err(d.Run("default", "task", "exec", "--exec-id", "x1", "early", "true")))
	testkit.Same(t, "after an exec", early, bySource(t, s, "containerd", "early"))
	must(t, testkit.Err(d.Run("default", "container", "label", "early", "a=c")))
	await(t, s, "the new label", func(snap Snapshot) bool { c, ok := named(snap, "early"); return ok && c.Labels["a"] == "c" })
	must(t, d.Remove("default", "early"))
	awaitGone(t, s, "early")
}

// The requests of a kubelet, as the CRI plugin keeps them.
const (
	sandboxData = `{"Version":"v1","Metadata":{"ID":"s1","Config":{
		"metadata":{"name":"web-0","uid":"1a-2b","namespace":"shop"},
		"labels":{"io.kubernetes.pod.name":"web-0","app":"web","fairlead.net.weight":"1"},
		"annotations":{"fairlead.net.rate":"5mbit","fairlead.net.weight":"2","both":"pod","io.kubernetes.pod.name":"forged"},
		"linux":{"cgroup_parent":"/kubepods/burstable/pod1a-2b"}}}}`
	containerData = `{"Version":"v1","Metadata":{"ID":"c1","SandboxID":"s1","Config":{
		"metadata":{"name":"server"},
		"labels":{"io.kubernetes.container.name":"server"},
		"annotations":{"both":"container"}}}}`
)

// A container of the CRI is described by the requests alone: the plugin merges the image's labels
// into containerd's.
func TestCRIRecord(t *testing.T) {
	sandbox := &containers.Container{
		ID:         "s1",
		Labels:     map[string]string{kindLabel: "sandbox", podLabel: "web-0", "app": "web", "fairlead.net.weight": "1", "pause": "image"},
		Extensions: map[string]*anypb.Any{sandboxMetadata: {Value: []byte(sandboxData)}},
	}
	podLabels := map[string]string{podLabel: "web-0", "app": "web", "fairlead.net.weight": "1"}
	inner := &containers.Container{
		ID: "c1", Image: "img",
		Labels: map[string]string{
			kindLabel: "container", "io.kubernetes.container.name": "server",
			podLabel: "other", "app": "other", "fairlead.net.rate": "900mbit", nerdctlName: "other",
		},
		Extensions: map[string]*anypb.Any{containerMetadata: {Value: []byte(containerData)}},
	}
	forged := &containers.Container{ID: "x", Labels: map[string]string{
		kindLabel: "sandbox", podLabel: "x", namespaceLabel: "y", "io.kubernetes.container.name": "z",
	}}
	for _, tc := range []struct {
		name    string
		ct, pod *containers.Container
		want    Record
	}{
		{"container of a pod", inner, sandbox, Record{
			Name: "server", RuntimeID: "c1", Image: "img", Pod: "web-0", Namespace: "shop", PodUID: "1a-2b", PodCgroup: "pod1a-2b",
			Labels: map[string]string{
				"io.kubernetes.container.name": "server", podLabel: "web-0", "app": "web",
				"both": "container", "fairlead.net.rate": "5mbit", "fairlead.net.weight": "2",
			},
			ImageLabels: map[string]string{podLabel: "other", "app": "other", "fairlead.net.rate": "900mbit", nerdctlName: "other"},
			Annotations: map[string]bool{"both": true, "fairlead.net.rate": true, "fairlead.net.weight": true},
		}},
		{"pause", sandbox, nil, Record{Name: "pause", RuntimeID: "s1", Pod: "web-0", Namespace: "shop", PodUID: "1a-2b", PodCgroup: "pod1a-2b",
			Labels: podLabels, ImageLabels: map[string]string{"pause": "image"}, Sandbox: true}},
		{"labels as if of the CRI", forged, nil, Record{Name: "x", RuntimeID: "x", Labels: forged.Labels}},
		{"broken metadata", &containers.Container{ID: "x", Labels: map[string]string{"a": "b"}, Extensions: map[string]*anypb.Any{containerMetadata: {Value: []byte("{")}}}, nil,
			Record{Name: "x", RuntimeID: "x", Labels: map[string]string{}, ImageLabels: map[string]string{"a": "b"}}},
		{"nothing", nil, nil, Record{}},
	} {
		testkit.Same(t, tc.name, tc.want, criRecord(tc.ct, tc.pod))
	}
}

// A directory is a pod's own if the CRI names it and it is called so.
func TestPodCgroup(t *testing.T) {
	for _, tc := range []struct{ uid, parent, want string }{
		{"1a-2b", "/kubepods/burstable/pod1a-2b", "pod1a-2b"},
		{"1a-2b", "kubepods-burstable-pod1a_2b.slice", "kubepods-burstable-pod1a_2b.slice"},
		{"1a-2b", "/docker", ""},
		{"1a-2b", "", ""},
		{"", "/kubepods/pod", ""},
		{"2b", "/kubepods/pod1a-2b", ""},
	} {
		testkit.Same(t, fmt.Sprintf("uid %q in %q", tc.uid, tc.parent), tc.want, podCgroup(tc.parent, tc.uid))
	}
	for _, tc := range []struct {
		dirs container.Cgroup
		want bool
	}{
		{container.Cgroup{V2: "/c/pod1/x", CPU: "/cpu/pod1/x"}, true},
		{container.Cgroup{V2: "/c/pod1/x", CPU: "/cpu/docker/x"}, false},
		{container.Cgroup{V2: "/c/pod1/x/y", CPU: "/cpu/pod1/x"}, false},
		{container.Cgroup{V2: "/c/pod1/x"}, false},
	} {
		testkit.Same(t, fmt.Sprintf("%+v", tc.dirs), tc.want, inPod(tc.dirs, "pod1"))
	}
}

func FuzzImage(f *testing.F) {
	f.Add([]byte(`{"manifests":[{"digest":"sha256:1"}]}`))
	f.Add([]byte(`{"config":{"digest":"sha256:2"}}`))
	f.Add([]byte(`{"config":{"Labels":{"a":"b"}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := parseBlob(data)
		if err != nil {
			return
		}
		again, err := json.Marshal(b)
		must(t, err)
		testkit.Gives(t, "read again", b)(parseBlob(again))
	})
}

func FuzzCRI(f *testing.F) {
	f.Add([]byte(`{"Version":"v1","Metadata":{"SandboxID":"s1","Config":{"annotations":{"a":"b"}}}}`))
	f.Add([]byte(`{"Metadata":{"Config":null}}`))
	f.Add([]byte(`{"Metadata":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := parseCRI(b)
		again, err := json.Marshal(struct{ Metadata criData }{got})
		must(t, err)
		testkit.Same(t, "read again", got, parseCRI(again), cmp.Transformer("len", func(m map[string]string) int { return len(m) }))
	})
}

// extend writes an extension of a container, as only a client of containerd can.
func extend(t *testing.T, d *testkit.Containerd, id, name, value string) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer conn.Close()
	ctx := metadata.AppendToOutgoingContext(t.Context(), namespaceHeader, "k8s.io")
	_, err = containers.NewContainersClient(conn).Update(ctx, &containers.UpdateContainerRequest{
		Container:  &containers.Container{ID: id, Extensions: map[string]*anypb.Any{name: {TypeUrl: "fairlead.net/test", Value: []byte(value)}}},
		UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"extensions"}},
	})
	must(t, err)
}
