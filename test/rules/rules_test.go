// Package rules checks the house rules of CONTRIBUTING.md that a program can check, as tests over
// the module's own source: who may import what, and what no file may contain. It exports no code.
package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

const module = "github.com/fairlead-project/fairlead"

// pkg is go list's description of one package of the module.
type pkg struct {
	Dir, ImportPath, Doc                        string
	GoFiles, TestGoFiles, XTestGoFiles, Imports []string
	TestImports, XTestImports                   []string
}

// name is the package's path below the module: "kernel/netdev".
func (p pkg) name() string { return below(p.ImportPath) }

// below removes the module's path from an import path. It returns paths of other modules, and of
// the standard library, unchanged.
func below(path string) string { return strings.TrimPrefix(path, module+"/") }

// in reports whether the package is one of the folders or below one.
func in(name string, folders ...string) bool {
	return slices.ContainsFunc(folders, func(f string) bool { return name == f || strings.HasPrefix(name, f+"/") })
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=Dir,ImportPath,Doc,GoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports", module+"/...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var list []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
	if len(list) < 5 {
		t.Fatalf("go list found %d packages", len(list))
	}
	return list
}

// brokenImport returns the rule that an import breaks, "" if none. Names are those of pkg.name.
// Only the rules between features bind tests.
func brokenImport(from, to string, test bool) string {
	feature := func(name string) bool { return strings.HasPrefix(name, "feature/") }
	top := func(name string) string { return strings.Join(strings.SplitN(name+"/", "/", 3)[:2], "/") }
	if feature(from) && feature(to) && top(from) != top(to) {
		return "features never import one another"
	}
	if test || in(from, "test", "internal/testkit", "cmd/internal/verbtest") {
		return ""
	}
	own := in(to, "agent", "api", "backoff", "cmd", "container", "discover", "feature", "hist", "hook", "internal", "kernel", "lab", "metrics", "policy", "record", "tenant", "test", "view")
	switch {
	case in(to, "internal/testkit", "cmd/internal/verbtest", "test"):
		return "only tests import what is for tests"
	case from == "container" && own:
		return "container imports nothing of ours"
	case from == "policy" && own && to != "container":
		return "policy imports container only"
	case from == "tenant" && (own && !in(to, "container", "policy") || in(to, "os", "syscall", "golang.org/x/sys")):
		return "tenant imports container and policy only, and is pure"
	case in(from, "api") && own && !in(to, "api"):
		return "api imports nothing of ours"
	case from == "record" && own && to != "api":
		return "record imports api only"
	case in(from, "agent/serve") && own && !in(to, "agent/serve", "api", "metrics"):
		return "agent/serve imports api and metrics only: it knows the agent as a Backend"
	case in(to, "agent/serve") && !in(from, "agent"):
		return "only agent serves"
	case in(from, "backoff", "hist") && own:
		return from + " imports nothing of ours"
	case in(from, "view") && own && !in(to, "api", "record", "view"):
		return "view/... imports api and record only"
	case in(to, "view") && !in(from, "view", "cmd", "lab"):
		return "the agent links no view; cmd and lab/... show them"
	case in(from, "kernel") && own && !in(to, "kernel"):
		return "kernel/... imports nothing above it"
	case feature(from) && own && !feature(to) && !in(to, "feature", "policy", "container", "tenant", "hook", "api", "backoff", "hist", "kernel", "metrics"):
		return "a feature imports feature, policy, container, tenant/..., hook, api, backoff, hist, kernel/... and metrics only"
	case in(from, "tenant/identity") && own && !in(to, "container", "kernel"):
		return "tenant/identity imports container and kernel/... only"
	case from == "hook" && own && !in(to, "container", "kernel"):
		return "hook imports container and kernel/... only"
	case in(to, "cmd/fairlead") && !in(from, "cmd/fairlead"):
		return "only the program has its verbs"
	case in(to, "lab") && !in(from, "lab", "cmd/fairlead-lab"):
		return "only lab/..., cmd/fairlead-lab and tests import lab/..."
	case feature(to) && !feature(from) && from != "agent":
		return "only agent imports features"
	case to == "github.com/cilium/ebpf/rlimit" && from != "kernel/bpf":
		return "kernel/bpf loads BPF objects"
	case in(to, "github.com/cilium/ebpf") && !in(from, "feature", "hook", "tenant/identity", "kernel", "lab/rig"):
		return "BPF is loaded in feature/..., hook, tenant/identity, kernel/... and lab/rig only"
	case in(to, "github.com/vishvananda/netlink", "github.com/vishvananda/netns", "github.com/safchain/ethtool") &&
		!in(from, "kernel/netdev", "kernel/qdisc", "kernel/conntrack", "kernel/probe", "lab"):
		return "netlink is spoken in kernel/netdev, kernel/qdisc, kernel/conntrack, kernel/probe and lab/... only"
	case to == "os/exec" && !in(from, "lab", "cmd", "kernel/enter"):
		return "programs are started in lab/..., cmd and kernel/enter only"
	case in(to, "github.com/moby/moby", "github.com/containerd/containerd", "k8s.io/cri-api") && from != "discover":
		return "runtimes are spoken to in discover only"
	case in(to, "k8s.io") && !in(from, "discover", "agent/deviceplugin"):
		return "Kubernetes is spoken to in discover/... and agent/deviceplugin only"
	}
	return ""
}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		check := func(imports []string, test bool) {
			for _, imp := range imports {
				if rule := brokenImport(p.name(), below(imp), test); rule != "" {
					t.Errorf("%s imports %s: %s", p.name(), below(imp), rule)
				}
			}
		}
		check(p.Imports, false)
		check(slices.Concat(p.TestImports, p.XTestImports), true)
	}
}

// dependencies lists what a package imports, however far.
func dependencies(t *testing.T, of string) (list []string) {
	t.Helper()
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", module+"/"+of).Output()
	must(t, err)
	for path := range strings.FieldsSeq(string(out)) {
		list = append(list, below(path))
	}
	if !slices.Contains(list, of) {
		t.Fatalf("go list: %q", list)
	}
	return list
}

// TestAPIIsALeaf checks that an importer of the API's types and client imports neither the agent
// nor the clients of runtimes, netlink and BPF.
func TestAPIIsALeaf(t *testing.T) {
	for _, dep := range dependencies(t, "api") {
		if !in(dep, "api", "golang.org/x") {
			t.Errorf("api depends on %s", dep)
		}
	}
}

// TestAgentDrawsNothing checks that neither the agent nor what it imports, however far, is a view.
func TestAgentDrawsNothing(t *testing.T) {
	for _, dep := range dependencies(t, "agent") {
		if in(dep, "view") {
			t.Errorf("agent depends on %s", dep)
		}
	}
}

func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 && len(strings.Fields(p.Doc)) < 5 {
			t.Errorf("%s has no package comment: what it is, what it is not, who calls it", p.name())
		}
	}
}

var must = testkit.Must
