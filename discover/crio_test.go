package discover

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	containers "github.com/containerd/containerd/api/services/containers/v1"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// fakeCRI is a runtime that speaks the CRI.
type fakeCRI struct {
	runtimeapi.UnimplementedRuntimeServiceServer

	mu         sync.Mutex
	containers map[string]*runtimeapi.ContainerStatusResponse
	sandboxes  map[string]*runtimeapi.PodSandboxStatusResponse
	events     chan *runtimeapi.ContainerEventResponse // nil: it has none
	hangUp     chan struct{}                           // ends a stream of these
	noPods     error                                   // nil: it answers about sandboxes
}

func newFakeCRI() *fakeCRI {
	return &fakeCRI{containers: make(map[string]*runtimeapi.ContainerStatusResponse), sandboxes: make(map[string]*runtimeapi.PodSandboxStatusResponse)}
}

func (f *fakeCRI) serve(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "crio.sock")
	l, err := net.Listen("unix", socket)
	must(t, err)
	s := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(s, f)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return socket
}

func (f *fakeCRI) ListContainers(_ context.Context, r *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out runtimeapi.ListContainersResponse
	for id, ct := range f.containers {
		if ct.Status.State == r.Filter.State.State {
			out.Containers = append(out.Containers, &runtimeapi.Container{Id: id})
		}
	}
	return &out, nil
}

func (f *fakeCRI) ListPodSandbox(context.Context, *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out runtimeapi.ListPodSandboxResponse
	for id := range f.sandboxes {
		out.Items = append(out.Items, &runtimeapi.PodSandbox{Id: id})
	}
	return &out, nil
}

func (f *fakeCRI) ContainerStatus(_ context.Context, r *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ct := f.containers[r.ContainerId]; ct != nil && r.Verbose {
		return ct, nil
	}
	return nil, status.Error(codes.NotFound, "no such container")
}

func (f *fakeCRI) PodSandboxStatus(_ context.Context, r *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noPods != nil {
		return nil, f.noPods
	}
	if s := f.sandboxes[r.PodSandboxId]; s != nil {
		return s, nil
	}
	return nil, status.Error(codes.NotFound, "no such sandbox")
}

func (f *fakeCRI) GetContainerEvents(_ *runtimeapi.GetEventsRequest, s grpc.ServerStreamingServer[runtimeapi.ContainerEventResponse]) error {
	if f.events == nil {
		return status.Error(codes.Unimplemented, "no events")
	}
	for {
		select {
		case ev := <-f.events:
			if err := s.Send(ev); err != nil {
				return err
			}
		case <-f.hangUp:
			return nil
		case <-s.Context().Done():
			return nil
		}
	}
}

// sandbox adds a pod; pid 0: without a pause container.
func (f *fakeCRI) sandbox(id, name, uid string, pid int, annotations map[string]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sandboxes[id] = &runtimeapi.PodSandboxStatusResponse{
		Status: &runtimeapi.PodSandboxStatus{
			Id: id, State: runtimeapi.PodSandboxState_SANDBOX_READY, Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "shop", Uid: uid},
			Labels: map[string]string{"app": "web", podLabel: name}, Annotations: annotations,
		},
		Info: map[string]string{"info": fmt.Sprintf(`{"pid": %d, "runtimeSpec": {"linux": {"cgroupsPath": "kubepods-burstable-pod%s.slice:crio:%s"}}}`, pid, uid, id)},
	}
}

func (f *fakeCRI) container(id, name, sandbox, uid string, pid int, state runtimeapi.ContainerState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.containers[id] = &runtimeapi.ContainerStatusResponse{
		Status: &runtimeapi.ContainerStatus{
			Id: id, State: state, Metadata: &runtimeapi.ContainerMetadata{Name: name},
			Image: &runtimeapi.ImageSpec{Image: "sha256:0123", UserSpecifiedImage: "registry.example.com/httpd:2"}, ImageRef: "sha256:0123",
			Labels: map[string]string{containerLabel: name}, Annotations: map[string]string{"io.kubernetes.container.hash": "1"},
		},
		Info: map[string]string{"info": fmt.Sprintf(`{"sandboxID": %q, "pid": %d, "runtimeSpec": {"linux": {"cgroupsPath": "/kubepods/burstable/pod%s/crio-%s"}}}`, sandbox, pid, uid, id)},
	}
}

func (f *fakeCRI) remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.containers, id)
}

// TestCRIO has a pod with an init container that has ended, two others, and a pause container; one
// container ends, and comes again under the same name.
func TestCRIO(t *testing.T) {
	t.Parallel()
	for _, events := range []bool{false, true} {
		t.Run(fmt.Sprint("events ", events), func(t *testing.T) {
			f := newFakeCRI()
			if events {
				f.events, f.hangUp = make(chan *runtimeapi.ContainerEventResponse), make(chan struct{})
			}
			cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
			start := func(name string) int { return sleeper(t, ns, cg.Child(t, name)).Process.Pid }
			pause, httpd, proxy := start("pause"), start("httpd"), start("proxy")
			f.sandbox("s1", "web-0", "1a-2b", pause, map[string]string{"fairlead.net.rate": "5mbit", "io.kubernetes.x": "y", "app": "annotated"})
			f.container("i1", "init", "s1", "1a-2b", 1, runtimeapi.ContainerState_CONTAINER_EXITED)
			f.container("c1", "httpd", "s1", "1a-2b", httpd, runtimeapi.ContainerState_CONTAINER_RUNNING)
			f.container("c2", "proxy", "s1", "1a-2b", proxy, runtimeapi.ContainerState_CONTAINER_RUNNING)

			s := runSet(t, Config{NetNS: ns.Path}, CRIO(f.serve(t)))
			snap := awaitNames(t, s, "the pod", "shop/web-0/httpd", "shop/web-0/proxy")
			c, _ := named(snap, "shop/web-0/httpd")
			if c.Source != "cri-o" || c.RuntimeID != "c1" || c.Image != "registry.example.com/httpd:2" || c.Pod != "web-0" || c.Namespace != "shop" || c.PID != httpd {
				t.Errorf("%+v", c)
			}
			labels := map[string]string{containerLabel: "httpd", podLabel: "web-0", "app": "annotated", "fairlead.net.rate": "5mbit"}
			testkit.Same(t, "Labels", labels, c.Labels)
			testkit.Same(t, "annotations", []string{"app", "fairlead.net.rate"}, slices.Sorted(maps.Keys(c.Annotations)))

			tell := func(id string, what runtimeapi.ContainerEventType) {
				if events {
					select {
					case f.events <- &runtimeapi.ContainerEventResponse{ContainerId: id, ContainerEventType: what}:
					case <-time.After(60 * time.Second):
						t.Fatal("nobody listens to events")
					}
				}
			}
			if events { // the stream ends, and another one begins
				f.hangUp <- struct{}{}
			}
			kill(t, proxy)
			f.remove("c2")
			tell("c2", runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
			awaitNames(t, s, "one has ended", "shop/web-0/httpd")
			again := start("again")
			f.container("c3", "proxy", "s1", "1a-2b", again, runtimeapi.ContainerState_CONTAINER_RUNNING)
			tell("c3", runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
			snap = awaitNames(t, s, "it has come again", "shop/web-0/httpd", "shop/web-0/proxy")
			if c, _ := named(snap, "shop/web-0/proxy"); c.RuntimeID != "c3" || c.PID != again {
				t.Errorf("%+v", c)
			}
		})
	}
}

// TestPodUnread has a runtime that does not answer about the pod of a container, and then one that
// has no such pod: only then is the container known as it is.
func TestPodUnread(t *testing.T) {
	f := newFakeCRI()
	f.sandbox("s1", "web-0", "u1", 0, map[string]string{"fairlead.net.rate": "5mbit"})
	f.container("c1", "httpd", "s1", "u1", os.Getpid(), runtimeapi.ContainerState_CONTAINER_RUNNING)
	conn, err := grpc.NewClient("unix://"+f.serve(t), grpc.WithAuthority("localhost"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer conn.Close()
	data, err := json.Marshal(map[string]any{"Metadata": criData{SandboxID: "s1"}})
	must(t, err)
	d := &fakeContainerd{container: &containers.Container{ID: "c1", Extensions: map[string]*anypb.Any{containerMetadata: {Value: data}}}}
	for name, inspect := range map[string]func() (Record, bool, error){
		"cri-o": func() (Record, bool, error) {
			return crioClient{runtimeapi.NewRuntimeServiceClient(conn)}.inspect(t.Context(), "c1")
		},
		"containerd": func() (Record, bool, error) {
			return cri{tasks: fakeTasks{}, containers: d}.inspect(t.Context(), "k8s.io/c1")
		},
	} {
		f.noPods = status.Error(codes.Unavailable, "too many requests")
		d.noPods = f.noPods
		if rec, runs, err := inspect(); err == nil || !runs || !rec.Unread || rec.PID != os.Getpid() {
			t.Errorf("%s does not answer: %+v, %v, %v", name, rec, runs, err)
		}
		f.noPods = status.Error(codes.NotFound, "no such sandbox")
		d.noPods = f.noPods
		if rec, runs, err := inspect(); err != nil || !runs || rec.Unread || rec.Pod != "" {
			t.Errorf("%s has no such pod: %+v, %v, %v", name, rec, runs, err)
		}
	}
}

// fakeContainerd has one container, of a pod about which it does not answer.
type fakeContainerd struct {
	containers.ContainersClient

	container *containers.Container
	noPods    error
}

func (f *fakeContainerd) Get(_ context.Context, r *containers.GetContainerRequest, _ ...grpc.CallOption) (*containers.GetContainerResponse, error) {
	if r.ID == f.container.ID {
		return &containers.GetContainerResponse{Container: f.container}, nil
	}
	return nil, f.noPods
}

// fakeTasks has this process as the task of each container.
type fakeTasks struct{ tasks.TasksClient }

func (fakeTasks) Get(context.Context, *tasks.GetRequest, ...grpc.CallOption) (*tasks.GetResponse, error) {
	return &tasks.GetResponse{Process: &task.Process{Pid: uint32(os.Getpid()), Status: task.Status_RUNNING}}, nil
}

func TestCRIORecord(t *testing.T) {
	pod := &runtimeapi.PodSandboxStatus{Id: "s1", Metadata: &runtimeapi.PodSandboxMetadata{Name: "web-0", Namespace: "shop", Uid: "1a-2b"}, Labels: map[string]string{"app": "web"}}
	for _, tt := range []struct{ path, want string }{
		{"kubepods-burstable-pod1a_2b.slice:crio:c1", "kubepods-burstable-pod1a_2b.slice"},
		{"/kubepods/burstable/pod1a-2b/crio-c1", "pod1a-2b"},
		{"/kubepods/burstable/pod9/crio-c1", ""},
		{"system.slice:crio:c1", ""},
		{"", ""},
	} {
		var info crioInfo
		info.PID, info.RuntimeSpec.Linux.CgroupsPath = 7, tt.path
		want := Record{
			PID: 7, RuntimeID: "s1", Name: "pause", Sandbox: true, Labels: map[string]string{"app": "web"},
			Pod: "web-0", Namespace: "shop", PodUID: "1a-2b", PodCgroup: tt.want,
		}
		testkit.Same(t, "crioRecord", want, crioRecord(nil, pod, info))
	}
	// One whose pod has gone meanwhile.
	ct := &runtimeapi.ContainerStatus{Id: "c1", ImageRef: "sha256:0123"}
	want := Record{RuntimeID: "c1", Name: "c1", Image: "sha256:0123", Labels: map[string]string{}}
	testkit.Same(t, "without its pod", want, crioRecord(ct, nil, crioInfo{}))
}

func FuzzCRIOInfo(f *testing.F) {
	testkit.Seeds(f, `{"sandboxID": "s", "pid": 1, "runtimeSpec": {"linux": {"cgroupsPath": "a:b:c"}}}`, `{"pid": "x"}`, `[]`, ``)
	f.Fuzz(func(t *testing.T, text string) {
		i := infoOf(map[string]string{"info": text})
		crioRecord(&runtimeapi.ContainerStatus{}, &runtimeapi.PodSandboxStatus{}, i)
	})
}
