package packages

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// TestKubernetesVersion checks that the manifests install this release on a cluster.
func TestKubernetesVersion(t *testing.T) {
	for file, line := range map[string]string{
		"base/kustomization.yaml": "    newTag: ",
		"chart/Chart.yaml":        "appVersion: ",
	} {
		text := read(t, filepath.Join("../../packaging/kubernetes", file))
		if !strings.Contains(text, "\n"+line+api.Release+"\n") {
			t.Errorf("%s: no %q of %s", file, strings.TrimSpace(line), api.Release)
		}
	}
}

// TestKubernetesObjects renders the kustomize base and the Helm chart. The objects must be the same
// except for the namespace, which Helm itself makes, and the checksum of the flags. For a checksum
// kustomize would rename the ConfigMap each time.
func TestKubernetesObjects(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "builds Helm and kustomize: only in the tier full")
	}
	render, run := renderer(t)
	base := render("", "kustomize", "base")
	if base["Namespace fairlead-system"]["metadata"] == nil {
		t.Errorf("no namespace in %v", base)
	}
	delete(base, "Namespace fairlead-system")
	chart := render("", "helm", "chart", "fairlead-system")
	sum := checksum(t, chart)
	testkit.Same(t, "kustomize and helm", base, chart)

	observing := render("", "kustomize", "observe-only")
	delete(observing, "Namespace fairlead-system")
	same := render("observeOnly: true", "helm", "chart", "fairlead-system")
	if got := checksum(t, same); got != sum {
		t.Errorf("the checksum of the same flags is %s and %s", sum, got)
	}
	// kustomize has the mounts that it patches first.
	anyOrder := cmpopts.SortSlices(func(a, b any) bool { return fmt.Sprint(a) < fmt.Sprint(b) })
	testkit.Same(t, "kustomize and helm, observing only", observing, same, anyOrder)

	readers := render("", "kustomize", "view")
	all := render("view: {enabled: true}", "helm", "chart", "fairlead-system")
	maps.DeleteFunc(all, func(name string, _ map[string]any) bool { return readers[name] == nil })
	testkit.Same(t, "readers by kustomize and helm", readers, all)
	// They may do nothing on the node.
	text := fmt.Sprint(readers["DaemonSet fairlead-view"])
	for _, want := range []string{"runAsUser:65534", "runAsNonRoot:true", "drop:[ALL]", "readOnlyRootFilesystem:true", "automountServiceAccountToken:false"} {
		if !strings.Contains(text, want) {
			t.Errorf("the readers have not %s: %s", want, text)
		}
	}
	for _, no := range []string{"hostNetwork", "hostPID", "privileged", "add:", "readOnly:false"} {
		if strings.Contains(text, no) || strings.Count(text, "mountPath") != strings.Count(text, "readOnly:true") {
			t.Errorf("the readers have %s, or a mount that can be written: %s", no, text)
		}
	}

	values := `
image: {tag: 9.9.9, pullPolicy: Never}
config: {log-level: debug, kubelet-dir: /var/lib/k0s/kubelet}
policy: {web.yaml: "match: {name: x}\nset: {netcpu: isolate}\n"}
podMonitor: {enabled: true, labels: {release: prometheus}}
kubeletDir: /var/lib/k0s/kubelet
podAnnotations: {prometheus.io/scrape: null, prometheus.io/port: null, prometheus.io/path: null}
`
	given := render(values, "helm", "chart", "elsewhere")
	if got := checksum(t, given); got == sum {
		t.Error("other flags have the same checksum: the pods would not be replaced")
	}
	text = fmt.Sprint(given)
	for _, want := range []string{"name:fairlead-metrics", ":9.9.9", "imagePullPolicy:Never", `log-level: "debug"`, "match: {name: x}", "release:prometheus", "mountPath:/var/lib/k0s/kubelet/device-plugins", "path:/var/lib/k0s/kubelet/device-plugins", "PodMonitor fairlead", "namespace:elsewhere"} {
		if !strings.Contains(text, want) {
			t.Errorf("with values there is no %q in\n%s", want, text)
		}
	}
	for _, no := range []string{"prometheus.io", "fairlead-system"} {
		if strings.Contains(text, no) {
			t.Errorf("with values there is %q in\n%s", no, text)
		}
	}

	closed := fmt.Sprint(render("{metricsAddr: \"\", podMonitor: {enabled: true}, observeOnly: true, policy: {web.yaml: \"match: {name: x}\\n\"}}", "helm", "chart", "elsewhere"))
	if strings.Contains(closed, "9643") || strings.Contains(closed, "PodMonitor") || !strings.Contains(closed, "--metrics-addr=]") {
		t.Errorf("without an address the metrics page is named in\n%s", closed)
	}
	if !strings.Contains(closed, "match: {name: x}") || !strings.Contains(closed, "labels: deny") {
		t.Errorf("observing only, not every policy is in\n%s", closed)
	}
	for value, key := range map[string]string{"imagee: {tag: x}": "imagee", "podMonitor: {interval: fast}": "interval", "policy: {web.txt: x}": "web.txt", "observeOnly: sometimes": "observeOnly"} {
		if out, err := run(value, "helm", "chart", "elsewhere"); err == nil || !strings.Contains(out, key) {
			t.Errorf("%s: %v\n%s", value, err, out)
		}
	}
	if out, err := run("config: {kubelet-dir: /elsewhere}", "helm", "chart", "elsewhere"); err == nil || !strings.Contains(out, "config.kubelet-dir is /elsewhere") {
		t.Errorf("with two directories of kubelet: %v\n%s", err, out)
	}
}

// checksum returns the checksum of the flags in the pods' annotations, and takes it out.
func checksum(t *testing.T, objects map[string]map[string]any) string {
	t.Helper()
	var at any = objects["DaemonSet fairlead"]
	for _, key := range []string{"spec", "template", "metadata", "annotations"} {
		in, _ := at.(map[string]any)
		at = in[key]
	}
	annotations, _ := at.(map[string]any)
	sum, _ := annotations["checksum/config"].(string)
	if len(sum) != 64 {
		t.Errorf("the checksum of the flags is %q", sum)
	}
	delete(annotations, "checksum/config")
	return sum
}

// renderer builds the program that renders, and returns a function that reads its objects, by kind
// and name, and one that returns what it prints.
func renderer(t *testing.T) (render func(values string, args ...string) map[string]map[string]any, run func(values string, args ...string) (string, error)) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "render")
	output(t, exec.Command("go", "-C", "../kubernetes/render", "build", "-o", program, "."))
	run = func(values string, args ...string) (string, error) {
		cmd := exec.Command(program, args...)
		cmd.Dir = "../../packaging/kubernetes"
		cmd.Stdin = strings.NewReader(values)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	return func(values string, args ...string) map[string]map[string]any {
		t.Helper()
		text, err := run(values, args...)
		if err != nil {
			t.Fatalf("render %q: %v\n%s", args, err, text)
		}
		objects := map[string]map[string]any{}
		for docs := yaml.NewDecoder(strings.NewReader(text)); ; {
			var o map[string]any
			err := docs.Decode(&o)
			if errors.Is(err, io.EOF) {
				return objects
			}
			must(t, err)
			meta, _ := o["metadata"].(map[string]any)
			objects[fmt.Sprint(o["kind"], " ", meta["name"])] = o
		}
	}, run
}

// TestImage makes the image of two programs twice, looks into the archive, and has Docker and
// containerd load it.
func TestImage(t *testing.T) {
	testkit.NeedRoot(t)
	dir := testkit.Tree(t, map[string]string{"amd64": "program of amd64", "arm64": "program of arm64"})
	output(t, exec.Command("go", "-C", "../../packaging/image", "build", "-o", filepath.Join(dir, "image"), "."))
	archive := func() []byte {
		cmd := exec.Command(filepath.Join(dir, "image"), "example.org/fairlead:1", "../../LICENSE", filepath.Join(dir, "amd64"), filepath.Join(dir, "arm64"))
		cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
		return []byte(output(t, cmd))
	}
	first := archive()
	if !bytes.Equal(first, archive()) {
		t.Error("two builds differ")
	}
	files := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(first)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		testkit.Must(t, err)
		text, err := io.ReadAll(r)
		testkit.Must(t, err)
		files[h.Name] = string(text)
	}
	index := files["index.json"]
	blob := regexp.MustCompile(`"digest": ?"sha256:([0-9a-f]+)"`).FindStringSubmatch(index)
	if blob == nil || !strings.Contains(index, `"io.containerd.image.name": "example.org/fairlead:1"`) {
		t.Fatalf("index.json: %s", index)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		if both := files["blobs/sha256/"+blob[1]]; !regexp.MustCompile(`"architecture": ?"` + arch + `"`).MatchString(both) {
			t.Errorf("no %s in %s", arch, both)
		}
	}
	var entries []struct {
		Config           string
		RepoTags, Layers []string
	}
	testkit.Must(t, json.Unmarshal([]byte(files["manifest.json"]), &entries))
	for i, tag := range []string{"example.org/fairlead:1", "example.org/fairlead:1-arm64"} {
		if d := entries[i]; d.RepoTags[0] != tag || files[d.Config] == "" || files[d.Layers[0]] == "" {
			t.Errorf("%+v, want %s and its blobs in the archive", d, tag)
		}
	}
	file := filepath.Join(dir, "image.tar")
	testkit.Must(t, os.WriteFile(file, first, 0o600))
	docker := testkit.StartDocker(t)
	docker.Must(t, "load", "--input", file)
	for tag, arch := range map[string]string{"1": "amd64", "1-arm64": "arm64"} {
		got := docker.Must(t, "image", "inspect", "--format", "{{.Os}}/{{.Architecture}} {{.Config.Entrypoint}} {{.Config.Cmd}}", "example.org/fairlead:"+tag)
		if want := "linux/" + arch + " [/usr/bin/fairlead] [agent]"; got != want {
			t.Errorf("in Docker %s is %s, want %s", tag, got, want)
		}
	}
	ctr := testkit.StartContainerd(t)
	if out, err := ctr.Run("default", "image", "import", "--snapshotter", "native", file); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	list, err := ctr.Run("default", "image", "ls", "name==example.org/fairlead:1")
	if testkit.Must(t, err); !strings.Contains(list, "linux/amd64,linux/arm64") {
		t.Errorf("containerd lists\n%s", list)
	}
}
