package discover

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

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
