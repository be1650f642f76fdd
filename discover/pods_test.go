package discover

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// fakePods is a source of pods that reports what the test says.
type fakePods struct {
	publish func(PodReport)
	news    <-chan struct{}
	ready   chan struct{}
}

func newFakePods() *fakePods { return &fakePods{ready: make(chan struct{})} }

func (f *fakePods) Name() string { return "kubelet" }

func (f *fakePods) Run(ctx context.Context, news <-chan struct{}, publish func(PodReport)) error {
	f.publish, f.news = publish, news
	close(f.ready)
	<-ctx.Done()
	return nil
}

func (f *fakePods) say(rep PodReport) {
	<-f.ready
	f.publish(rep)
}

// awaitOf waits until a container satisfies ok.
func awaitOf(t *testing.T, s *Set, name, what string, ok func(container.Container) bool) container.Container {
	t.Helper()
	var c container.Container
	await(t, s, what, func(snap Snapshot) bool {
		var found bool
		c, found = named(snap, name)
		return found && ok(c)
	})
	return c
}

// TestSetRequests has a pod of two containers with requests. Another agent starts while kubelet
// does not answer; then the pod is made anew, without requests.
func TestSetRequests(t *testing.T) {
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	record := func(name string) Record {
		return Record{PID: sleeper(t, ns, cg.Child(t, name)).Process.Pid, Name: name, RuntimeID: name + "-id", Pod: "web-0", Namespace: "shop", PodUID: "u1"}
	}
	httpd, proxy, pause := record("httpd"), record("proxy"), record("pause")
	pause.Sandbox = true
	requests := map[string]map[string]uint64{"httpd": {"egress-mbit": 50}, "proxy": {"egress-mbit": 20, "data-riops": 300}}
	pod := map[string]uint64{"egress-mbit": 70, "data-riops": 300}
	has := func(name string) func(container.Container) bool {
		return func(c container.Container) bool {
			return maps.Equal(c.Requests, requests[name]) && maps.Equal(c.PodRequests, pod)
		}
	}
	runtime, kubelet := newFake("containerd"), newFakePods()
	s := runSet(t, Config{NetNS: ns.Path, Pods: []PodSource{kubelet}}, runtime)
	runtime.report(httpd, proxy, pause)
	<-kubelet.ready
	<-kubelet.news // containers that it may not know
	if snap := s.Snapshot(); snap.Complete {
		t.Error("complete without kubelet's answer")
	}
	kubelet.say(PodReport{Pods: []Pod{{Namespace: "shop", Name: "web-0", Requests: requests}}})
	awaitOf(t, s, "shop/web-0/httpd", "its requests", has("httpd"))
	awaitOf(t, s, "shop/web-0/proxy", "its requests", has("proxy"))
	snap := await(t, s, "all", func(snap Snapshot) bool { return snap.Complete })
	testkit.Same(t, "containers", 2, len(snap.Containers))
	kubelet.say(PodReport{Err: errors.New("it restarts")})
	await(t, s, "the error", func(snap Snapshot) bool { return snap.Sources[1].Err != nil })
	awaitOf(t, s, "shop/web-0/proxy", "what was known", has("proxy"))

	data, err := json.Marshal(snap.Known)
	var known Known
	if err == nil {
		err = json.Unmarshal(data, &known)
	}
	must(t, err)
	runtime, kubelet = newFake("containerd"), newFakePods()
	s = runSet(t, Config{NetNS: ns.Path, Known: &known, Pods: []PodSource{kubelet}}, runtime)
	awaitOf(t, s, "shop/web-0/httpd", "what another agent knew", has("httpd"))
	runtime.report(httpd, proxy, pause)
	for what, rep := range map[string]PodReport{"it does not answer": {Err: errors.New("it does not answer")}, "not there": {Absent: true}} {
		kubelet.say(rep)
		snap := await(t, s, "the runtime's word", func(snap Snapshot) bool {
			return snap.Complete && snap.Sources[1].Err != nil && strings.Contains(snap.Sources[1].Err.Error(), what)
		})
		if c, _ := named(snap, "shop/web-0/httpd"); !has("httpd")(c) {
			t.Errorf("%s: what another agent knew of kubelet is %v, %v", what, c.Requests, c.PodRequests)
		}
	}

	kill(t, httpd.PID)
	<-kubelet.ready
	<-kubelet.news
	again := record("again")
	again.Name, again.PodUID = "httpd", "u2"
	runtime.report(again, pause)
	<-kubelet.news // the same name, and another container
	kubelet.say(PodReport{})
	awaitOf(t, s, "shop/web-0/httpd", "no requests", func(c container.Container) bool {
		return c.PID == again.PID && len(c.Requests)+len(c.PodRequests) == 0
	})
}

// TestPodNow has annotations and labels that were changed since the pod's start.
func TestPodNow(t *testing.T) {
	start := Record{
		Name: "httpd", Pod: "web-0", Namespace: "shop", PodUID: "u1",
		Labels: map[string]string{
			"io.kubernetes.container.name": "httpd", "app": "web", "old": "1",
			"fairlead.netcpu": "isolate", "fairlead.net.rate": "5mbit",
		},
		Annotations: map[string]bool{"fairlead.netcpu": true, "fairlead.net.rate": true},
		ImageLabels: map[string]string{"built": "x"},
	}
	now := Pod{
		Namespace: "shop", Name: "web-0", UID: "u1", Current: true,
		Labels:      map[string]string{"app": "web", "new": "2", "fairlead.netcpu": "observe"},
		Annotations: map[string]string{"fairlead.net.rate": "9mbit", "io.kubernetes.x": "y", "long": strings.Repeat("x", container.MaxLabel)},
	}
	got := start.with(now)
	want := start
	want.Labels = map[string]string{
		"io.kubernetes.container.name": "httpd", "app": "web", "new": "2", "fairlead.netcpu": "observe", "fairlead.net.rate": "9mbit",
	}
	want.Annotations = map[string]bool{"fairlead.net.rate": true, "long": true}
	want.LeftOut = map[string]int{"long": container.MaxLabel + 4}
	testkit.Same(t, "record", want, got)
	if start.Labels["fairlead.net.rate"] != "5mbit" || !start.Annotations["fairlead.netcpu"] {
		t.Error("the runtime's record was changed")
	}
	testkit.Same(t, "by a source that knows nothing of it", start, start.with(Pod{Namespace: "shop", Name: "web-0"}))
}

// TestPodLife has a pod with an init container, a sidecar and another container in one network; one
// of the same name that starts while that is ending; and a mirror pod. What kubelet and the API
// server know reaches those that it is about.
func TestPodLife(t *testing.T) {
	t.Parallel()
	const running, exited = runtimeapi.ContainerState_CONTAINER_RUNNING, runtimeapi.ContainerState_CONTAINER_EXITED
	f := newFakeCRI()
	cg, ns := testkit.Cgroup(t), testkit.NetNS(t)
	start := func(name string) int { return sleeper(t, ns, cg.Child(t, name)).Process.Pid }
	f.sandbox("s1", "web-0", "u1", 0, map[string]string{"fairlead.net.weight": "1"}) // without a pause container
	init := start("init")
	f.container("i1", "init", "s1", "u1", init, running)
	pods := newFakePods()
	s := runSet(t, Config{NetNS: ns.Path, Pods: []PodSource{pods}}, CRIO(f.serve(t)))
	pods.say(PodReport{Pods: []Pod{{Namespace: "shop", Name: "web-0", Requests: map[string]map[string]uint64{
		"httpd": {"egress-mbit": 50}, "proxy": {"egress-mbit": 20}, // of what lasts, and not of init
	}}}})
	of := func(id, what string, ok func(container.Container) bool) (c container.Container) {
		t.Helper()
		await(t, s, id+": "+what, func(snap Snapshot) bool {
			for _, c = range snap.Containers {
				if c.RuntimeID == id {
					return ok(c)
				}
			}
			return false
		})
		return c
	}
	of("i1", "what its pod requests, and nothing of its own", func(c container.Container) bool {
		return c.PodRequests["egress-mbit"] == 70 && len(c.Requests) == 0
	})

	kill(t, init)
	f.container("i1", "init", "s1", "u1", init, exited)
	httpd := start("httpd")
	f.container("c1", "httpd", "s1", "u1", httpd, running)
	f.container("c2", "proxy", "s1", "u1", start("proxy"), running)
	awaitNames(t, s, "init has ended", "shop/web-0/httpd", "shop/web-0/proxy")
	one := of("c1", "its request", func(c container.Container) bool {
		return c.PodRequests["egress-mbit"] == 70 && c.Requests["egress-mbit"] == 50
	})
	two := of("c2", "its request", func(c container.Container) bool { return c.Requests["egress-mbit"] == 20 })
	if one.NetNS != two.NetNS || one.ID == two.ID {
		t.Errorf("no pod: %+v, %+v", one, two)
	}

	f.sandbox("s2", "web-0", "u2", 0, map[string]string{"fairlead.net.weight": "2"})
	f.container("c3", "httpd", "s2", "u2", start("again"), running)
	f.sandbox("s3", "etcd-n1", "hash", 0, map[string]string{"fairlead.net.weight": "3"})
	f.container("c4", "etcd", "s3", "hash", start("etcd"), running)
	pods.say(PodReport{Pods: []Pod{
		{Namespace: "shop", Name: "web-0", UID: "u2", Annotations: map[string]string{"fairlead.net.weight": "8"}, Current: true},
		{Namespace: "shop", Name: "etcd-n1", UID: "hash", Annotations: map[string]string{"fairlead.net.weight": "9"}, Current: true},
	}})
	weight := func(want string) func(container.Container) bool {
		return func(c container.Container) bool { return c.Labels["fairlead.net.weight"] == want }
	}
	of("c3", "the annotation of now", weight("8"))
	of("c4", "the annotation of now", weight("9"))
	of("c1", "that of its own start", weight("1"))

	ended := of("c1", "still there", func(container.Container) bool { return true }).ID
	kill(t, httpd)
	f.remove("c1")
	await(t, s, "the pod has ended", func(snap Snapshot) bool {
		c, ok := s.Lookup(ended)
		return ok && c.PID == 0
	})
}
