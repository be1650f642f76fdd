package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// fakeKubelet answers List.
type fakeKubelet struct {
	podresources.UnimplementedPodResourcesListerServer

	mu   sync.Mutex
	list *podresources.ListPodResourcesResponse
	err  error
}

func (f *fakeKubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list, f.err
}

func (f *fakeKubelet) set(list *podresources.ListPodResourcesResponse, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list, f.err = list, err
}

func (f *fakeKubelet) serve(t *testing.T, socket string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	testkit.Must(t, err)
	s := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(s, f)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return s.Stop
}

// given is a container that was given so many devices of each resource; with one, as kubelet
// does, an entry for each device.
func given(name string, each bool, resources map[string]int) *podresources.ContainerResources {
	ct := &podresources.ContainerResources{Name: name}
	for resource, n := range resources {
		var ids []string
		for i := range n {
			ids = append(ids, strconv.Itoa(i))
		}
		if !each {
			ct.Devices = append(ct.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids})
			continue
		}
		for _, id := range ids {
			ct.Devices = append(ct.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
		}
	}
	return ct
}

func pod(namespace, name string, cts ...*podresources.ContainerResources) *podresources.PodResources {
	return &podresources.PodResources{Namespace: namespace, Name: name, Containers: cts}
}

func list(pods ...*podresources.PodResources) *podresources.ListPodResourcesResponse {
	return &podresources.ListPodResourcesResponse{PodResources: pods}
}

type reports struct{ got chan discover.PodReport }

// await waits for a report.
func (r reports) await(t *testing.T, what string, ok func(discover.PodReport) bool) {
	t.Helper()
	late := time.After(60 * time.Second)
	var last discover.PodReport
	for {
		select {
		case last = <-r.got:
			if ok(last) {
				return
			}
		case <-late:
			t.Fatalf("%s: last %+v", what, last)
		}
	}
}

func run(t *testing.T, s discover.PodSource) (r reports, news chan struct{}) {
	r, news = reports{make(chan discover.PodReport)}, make(chan struct{}, 1)
	stop := testkit.Background(t, func(ctx context.Context) error {
		return s.Run(ctx, news, func(rep discover.PodReport) {
			select {
			case r.got <- rep:
			case <-ctx.Done():
			}
		})
	})
	t.Cleanup(func() { testkit.Check(t, stop()) })
	return r, news
}

// TestKubelet starts it after the source, changes who was given what, and restarts it.
func TestKubelet(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	reports, news := run(t, Kubelet{Socket: socket, Domain: "fairlead.dev/", Every: time.Hour})
	reports.await(t, "no kubelet", func(r discover.PodReport) bool { return r.Absent && r.Err == nil })

	f := &fakeKubelet{}
	f.set(list(
		pod("shop", "web-0",
			given("httpd", true, map[string]int{"fairlead.dev/egress-mbit": 50, "example.com/gpu": 1}),
			given("proxy", false, map[string]int{"fairlead.dev/egress-mbit": 20, "fairlead.dev/data-riops": 300}),
			given("log", false, nil)),
		pod("shop", "other", given("x", false, map[string]int{"example.com/gpu": 1})),
	), nil)
	stop := f.serve(t, socket)
	want := []discover.Pod{{Namespace: "shop", Name: "web-0", Requests: map[string]map[string]uint64{
		"httpd": {"egress-mbit": 50}, "proxy": {"egress-mbit": 20, "data-riops": 300},
	}}}
	reports.await(t, "what was given", func(r discover.PodReport) bool {
		return r.Err == nil && !r.Absent && cmp.Diff(want, r.Pods) == ""
	})

	f.set(list(), nil)
	news <- struct{}{}
	reports.await(t, "the pod has ended", func(r discover.PodReport) bool { return r.Err == nil && len(r.Pods) == 0 })

	f.set(nil, fmt.Errorf("not yet"))
	news <- struct{}{}
	reports.await(t, "an error", func(r discover.PodReport) bool { return r.Err != nil && !r.Absent })
	stop()
	os.Remove(socket)
	reports.await(t, "no kubelet any more", func(r discover.PodReport) bool { return errors.Is(r.Err, fs.ErrNotExist) })
	f.set(list(pod("a", "b", given("c", false, map[string]int{"fairlead.dev/egress-mbit": 1}))), nil)
	f.serve(t, socket)
	reports.await(t, "after a restart", func(r discover.PodReport) bool { return r.Err == nil && len(r.Pods) == 1 })
}

// TestManyGiven has 110 pods that share 100 Gbit/s in both directions, each device in an entry of
// its own.
func TestManyGiven(t *testing.T) {
	all := list()
	for i := range 110 {
		all.PodResources = append(all.PodResources, pod("shop", fmt.Sprint("web-", i),
			given("httpd", true, map[string]int{"fairlead.dev/egress-mbit": 900, "fairlead.dev/ingress-mbit": 900})))
	}
	f := &fakeKubelet{}
	f.set(all, nil)
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	f.serve(t, socket)
	reports, _ := run(t, Kubelet{Socket: socket, Domain: "fairlead.dev/"})
	reports.await(t, "all", func(r discover.PodReport) bool {
		return len(r.Pods) == 110 && maps.Equal(r.Pods[7].Requests["httpd"], map[string]uint64{"egress-mbit": 900, "ingress-mbit": 900})
	})
}
