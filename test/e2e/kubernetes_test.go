package e2e

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/kubernetes"
)

// pod returns the manifest of a pod with sleeping containers, with the annotations that users of
// Kubernetes know, and ours.
func pod(name string, containers ...string) string {
	m := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata:
  name: %s
  namespace: shop
  annotations: {kubernetes.io/egress-bandwidth: 50M, fairlead.netcpu: isolate}
spec:
  terminationGracePeriodSeconds: 0
  containers:
`, name)
	for _, c := range containers {
		m += fmt.Sprintf("  - {name: %s, image: \"docker.io/library/flbusybox:latest\", imagePullPolicy: Never, command: [sleep, \"100000\"]}\n", c)
	}
	return m
}

// TestKubernetes has a kubelet and containerd run pods. Each container is known by
// NAMESPACE/POD/CONTAINER, the sandbox is no container, and the annotations of the pod are in force
// for its packets.
func TestKubernetes(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "only in the tier full")
	}
	testkit.NeedRoot(t)
	n := testkit.StartNode(t, kubelet(t))
	a := newAgent(t, n.NS, "--containerd", n.Socket)
	a.start()
	n.Pod(t, "web", pod("web", "httpd", "side"))
	n.Pod(t, "db", pod("db", "store"))
	at := func(pod, container string) string { return "shop/" + pod + "-" + n.Name + "/" + container }
	want := []string{at("db", "store"), at("web", "httpd"), at("web", "side")}
	await(t, "policy of all pods to be in force", func() error {
		list, err := a.api.Containers(t.Context())
		var names []string
		for _, c := range list {
			if !forced(c) {
				err = fmt.Errorf("%s: %+v", c.Name, c.Features)
			}
			names = append(names, c.Name)
		}
		if err == nil && !slices.Equal(names, want) {
			err = fmt.Errorf("containers are %q, want %q", names, want)
		}
		return err
	})
	x, err := a.api.Explain(t.Context(), "shop/db-"+n.Name) // a pod of one container
	must(t, err)
	for key, value := range map[string]string{"fairlead.net.ceil": "50M", "fairlead.netcpu": "isolate"} {
		if !slices.ContainsFunc(x.Container.Policy, func(s api.Setting) bool { return s.Key == key && s.Value == value && s.From == "annotation" }) {
			t.Errorf("policy is %+v, want %s=%s of an annotation", x.Container.Policy, key, value)
		}
	}
	mustSay(t, a.run("explain", "shop/web-"+n.Name), 1, "may be any of 2 containers")
	n.Pod(t, "web", "")
	await(t, "the pod to be gone", func() error {
		list, err := a.api.Containers(t.Context())
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("%d containers are left", len(list))
		}
		return err
	})
	a.stop()
}

// kubelet returns a program that is Kubernetes' kubelet if that is its name. The first build takes
// minutes.
func kubelet(t *testing.T) string {
	t.Helper()
	program, err := kubernetes.Build(t.Context())
	if errors.Is(err, kubernetes.ErrNoModules) {
		testkit.Skip(t, "no network to build a kubelet")
	}
	must(t, err)
	return program
}

// forced reports whether traffic and netcpu have finished with a container.
func forced(c api.Container) bool {
	done := 0
	for _, f := range c.Features {
		if (f.Feature == "traffic" || f.Feature == "netcpu") && f.State == api.StateDone {
			done++
		}
	}
	return done == 2
}
