// Package fleet tests fairlead on a cluster of Kubernetes as its users install it: two nodes, the
// image, the manifests of packaging/kubernetes, and pods that request resources in their own
// manifests. The API server, the scheduler and kubelets are real (package test/kubernetes); the
// machine has only two CPUs, one for each node. It takes minutes, so it runs in the tier full:
//
//	FAIRLEAD_TIER=full go test ./test/fleet -v -timeout 30m
package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/kubernetes"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// The images of the pods. The agent's image has the name of the manifests.
const (
	agentImage = "ghcr.io/fairlead-project/fairlead:0.1.0"
	loadImage  = "local.test/load:1"
)

const root = "../.." // of the repository

// patience bounds operations that take seconds, so that they may take longer on a busy machine.
const patience = 2 * time.Minute

// fleet is a cluster whose nodes have the images.
type fleet struct {
	*kubernetes.Cluster
	dir string // of the programs: fairlead and fairlead-lab
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	testkit.NeedRoot(t)
	f := &fleet{dir: t.TempDir()}
	var err error
	f.Cluster, err = kubernetes.Start(t.Context(), fmt.Sprintf("/tmp/flkubernetes-%d", os.Getpid()), 2)
	if errors.Is(err, kubernetes.ErrNoModules) || errors.Is(err, kubernetes.ErrMissing) {
		testkit.Skip(t, err.Error())
	}
	testkit.Must(t, err)
	t.Cleanup(func() { testkit.Must(t, f.Stop()) })
	images := f.images(t)
	for _, n := range f.Nodes {
		for _, path := range images {
			testkit.Must(t, n.Import(t.Context(), path))
		}
	}
	return f
}

// images builds the programs and returns archives with the images, for this machine's architecture
// only.
func (f *fleet) images(t *testing.T) []string {
	t.Helper()
	do := func(dir, to string, env []string, args ...string) {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), append(env, "CGO_ENABLED=0")...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, &stderr)
		}
		if to != "" {
			testkit.Must(t, os.WriteFile(to, out, 0o644))
		}
	}
	at := func(name string) string { return filepath.Join(f.dir, name) }
	do(root, "", nil, "go", "build", "-tags", "grpcnotrace", "-o", f.dir, "./cmd/fairlead", "./cmd/fairlead-lab")
	do(filepath.Join(root, "packaging/image"), "", nil, "go", "build", "-o", at("image"), ".")
	do(root, at("agent.tar"), []string{"SOURCE_DATE_EPOCH=1"}, at("image"), agentImage, "LICENSE", at("fairlead"), at("fairlead"))
	load, err := testkit.Image(loadImage, map[string]string{"bin/fairlead-lab": at("fairlead-lab")})
	testkit.Must(t, errors.Join(err, os.WriteFile(at("load.tar"), load, 0o644)))
	return []string{at("agent.tar"), at("load.tar")}
}

// kubectl runs kubectl, which must succeed.
func (f *fleet) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := f.Kubectl(context.WithoutCancel(t.Context()), args...) // also in cleanups
	testkit.Must(t, err)
	return out
}

// agent returns a client of the agent on a node.
func (f *fleet) agent(t *testing.T, n *kubernetes.Node) *api.Client {
	t.Helper()
	c := api.Dial(fmt.Sprintf("/proc/%d/root%s", n.PID(), api.DefaultSocket))
	t.Cleanup(func() { c.Close() })
	return c
}

// pod describes a pod of one container in the namespace shop.
type pod struct {
	name        string
	node        string            // "" leaves it to the scheduler
	annotations map[string]string // policy
	limits      map[string]string // "cpu": "500m"
	request     string            // of the CPU, "200m" if empty
	command     []string
}

func (p pod) manifest(t *testing.T) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": p.name, "namespace": "shop", "annotations": p.annotations, "labels": map[string]string{"app": p.name}},
		"spec": map[string]any{
			"nodeSelector": selector(p.node), "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
			"containers": []any{map[string]any{
				"name": "main", "image": loadImage, "imagePullPolicy": "Never", "command": p.command,
				"resources": map[string]any{"limits": p.limits, "requests": map[string]string{"cpu": cmp.Or(p.request, "200m")}},
			}},
		},
	})
	testkit.Must(t, err)
	return string(text) + "\n---\n"
}

func selector(node string) map[string]string {
	if node == "" {
		return nil
	}
	return map[string]string{"kubernetes.io/hostname": node}
}

// run starts pods, waits until they run, and returns the address of the last.
func (f *fleet) run(t *testing.T, pods ...pod) (address string) {
	t.Helper()
	f.apply(t, pods...)
	args := []string{"wait", "--namespace=shop", "--for=jsonpath={.status.phase}=Running", fmt.Sprint("--timeout=", patience)}
	for _, p := range pods {
		args = append(args, "pod/"+p.name)
	}
	f.kubectl(t, args...)
	return f.kubectl(t, "get", "--namespace=shop", args[len(args)-1], "-o", "jsonpath={.status.podIP}")
}

// apply applies the pods, and removes them when t ends.
func (f *fleet) apply(t *testing.T, pods ...pod) {
	t.Helper()
	manifests := ""
	args := []string{"delete", "--namespace=shop", "--wait", "--ignore-not-found"}
	for _, p := range pods {
		manifests += p.manifest(t)
		args = append(args, "pod/"+p.name)
	}
	testkit.Must(t, f.Apply(t.Context(), manifests))
	t.Cleanup(func() { f.kubectl(t, args...) })
}

// window matches a line of a load generator, which counts over a second.
type window struct {
	Ops     float64 `json:"ops_per_second"`
	BitRate float64 `json:"bits_per_second"`
}

// windows returns what a pod's load generator has counted so far.
func (f *fleet) windows(t *testing.T, pod string) (list []window) {
	t.Helper()
	for line := range strings.SplitSeq(f.kubectl(t, "logs", "--namespace=shop", pod), "\n") {
		var w window
		if json.Unmarshal([]byte(line), &w) == nil { // no line that has not ended
			list = append(list, w)
		}
	}
	return list
}

// measure returns the mean of what a pod's load generator counts in the next n windows.
func (f *fleet) measure(t *testing.T, pod string, n int) (mean window) {
	t.Helper()
	begin := len(f.windows(t, pod)) + 1          // the first may have begun before
	time.Sleep(time.Duration(n+2) * time.Second) // kubectl takes CPU time itself
	await(t, "lines of "+pod, func() error {
		list := f.windows(t, pod)
		if len(list) < begin+n {
			return fmt.Errorf("%d of %d", len(list)-begin, n)
		}
		mean = window{}
		for _, w := range list[begin : begin+n] {
			mean.Ops += w.Ops / float64(n)
			mean.BitRate += w.BitRate / float64(n)
		}
		return nil
	})
	return mean
}

// await waits until try succeeds, and fails the test if it never does.
func await(t *testing.T, what string, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("wait for %s: %v", what, err)
		}
	}
}
