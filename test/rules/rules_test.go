// Package rules checks the house rules of CONTRIBUTING.md that a program can check, as tests over
// the module's own source: who may import what, and what no file may contain. It exports no code.
package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
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

// below cuts the module off an import path. It returns a path of another module, or of the standard
// library, unchanged.
func below(path string) string { return strings.TrimPrefix(path, module+"/") }

// in reports whether the package is one of the folders, or lies below one.
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
	if test || in(from, "test", "internal/testkit") {
		return ""
	}
	own := in(to, "agent", "api", "cmd", "container", "discover", "feature", "hist", "hook", "internal", "kernel", "lab", "metrics", "policy", "record", "tenant", "test", "view")
	switch {
	case in(to, "internal/testkit", "test"):
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
	case from == "hist" && own:
		return "hist imports nothing of ours"
	case in(from, "view") && own && !in(to, "api", "record", "view"):
		return "view/... imports api and record only"
	case in(to, "view") && !in(from, "view", "cmd", "lab"):
		return "the agent links no view; cmd and lab/... show them"
	case in(to, "view/viewtest"):
		return "only tests import what is for tests"
	case in(from, "kernel") && own && !in(to, "kernel"):
		return "kernel/... imports nothing above it"
	case feature(from) && own && !feature(to) && !in(to, "feature", "policy", "container", "tenant", "hook", "api", "hist", "kernel", "metrics"):
		return "a feature imports feature, policy, container, tenant/..., hook, api, hist, kernel/... and metrics only"
	case in(from, "tenant/identity") && own && !in(to, "container", "kernel"):
		return "tenant/identity imports container and kernel/... only"
	case from == "hook" && own && !in(to, "container", "kernel"):
		return "hook imports container and kernel/... only"
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
	case in(to, "github.com/moby/moby", "github.com/containerd/containerd") && from != "discover":
		return "runtimes are spoken to in discover only"
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

// TestAPIIsALeaf checks that an importer of the API's types and client imports neither the agent
// nor the clients of runtimes, netlink and BPF.
func TestAPIIsALeaf(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", module+"/api").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	list := strings.Fields(string(out))
	if !slices.Contains(list, module+"/api") {
		t.Fatalf("go list: %q", list)
	}
	for _, dep := range list {
		if !in(below(dep), "api", "golang.org/x") {
			t.Errorf("api depends on %s", below(dep))
		}
	}
}

func TestBrokenImport(t *testing.T) {
	for _, tt := range []struct {
		from, to string
		test, ok bool
	}{
		{"policy", "container", false, true},
		{"policy", "kernel/cgroup", false, false},
		{"policy", "strings", false, true},
		{"api", "container", false, false},
		{"api", "container", true, true},
		{"agent/serve", "api", false, true},
		{"agent/serve", "agent", false, false},
		{"metrics", "agent/serve", false, false},
		{"api", "golang.org/x/sys/unix", false, true},
		{"record", "api", false, true},
		{"record", "agent", false, false},
		{"agent", "record", false, true},
		{"tenant", "policy", false, true},
		{"tenant", "container", false, true},
		{"tenant", "hook", false, false},
		{"tenant", "os", false, false},
		{"tenant", "github.com/cilium/ebpf", false, false},
		{"policy", "tenant", false, false},
		{"kernel/netdev", "tenant", false, false},
		{"tenant/identity", "tenant", false, false},
		{"feature/overlay", "tenant", false, true},
		{"feature/netcpu", "feature", false, true},
		{"feature/netcpu", "feature/traffic", false, false},
		{"feature/netcpu", "feature/traffic", true, false},
		{"feature/netcpu", "kernel/netdev", false, true},
		{"feature/netcpu", "api", false, true},
		{"feature/netcpu", "hook", false, true},
		{"hook", "kernel/qdisc", false, true},
		{"hook", "feature", false, false},
		{"feature/netcpu", "agent", false, false},
		{"agent", "feature/netcpu", false, true},
		{"cmd/fairlead", "feature/netcpu", false, false},
		{"kernel/bpf", "github.com/cilium/ebpf/link", false, true},
		{"kernel/bpf", "github.com/cilium/ebpf/rlimit", false, true},
		{"feature/netcpu", "github.com/cilium/ebpf/rlimit", false, false},
		{"agent", "github.com/cilium/ebpf", false, false},
		{"lab/bench", "github.com/cilium/ebpf", false, false},
		{"lab/rig", "github.com/cilium/ebpf/link", false, true},
		{"kernel/cgroup", "github.com/vishvananda/netlink", false, false},
		{"kernel/cgroup", "github.com/vishvananda/netlink", true, true},
		{"kernel/sched", "container", false, false},
		{"feature/netcpu", "hist", false, true},
		{"hist", "feature", false, false},
		{"discover", "os/exec", false, false},
		{"discover", "github.com/moby/moby/client", false, true},
		{"container", "github.com/moby/moby/client", false, false},
		{"container", "kernel/netdev", false, false},
		{"agent", "github.com/moby/moby/client", false, false},
		{"view", "agent", false, false},
		{"view/tui", "view", false, true},
		{"view/tui", "record", false, true},
		{"agent", "view", false, false},
		{"lab/report", "view/web", false, true},
		{"view/tui", "view/viewtest", false, false},
		{"cmd/fairlead", "view/tui", false, true},
		{"lab/sandbox", "internal/testkit", false, false},
		{"cmd/fairlead", "lab/bench", false, false},
		{"cmd/fairlead", "lab/load", true, true},
		{"agent", "lab/sandbox", false, false},
		{"cmd/fairlead-lab", "lab/bench", false, true},
		{"lab/bench", "lab/rig", false, true},
		{"kernel/enter", "os/exec", false, true},
		{"kernel/bpf", "os/exec", false, false},
	} {
		if rule := brokenImport(tt.from, tt.to, tt.test); (rule == "") != tt.ok {
			t.Errorf("%s imports %s (test %v): %q", tt.from, tt.to, tt.test, rule)
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

var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func TestSource(t *testing.T) {
	for _, p := range packages(t) {
		files := slices.Concat(p.GoFiles, p.TestGoFiles, p.XTestGoFiles)
		c, _ := filepath.Glob(filepath.Join(p.Dir, "*.[ch]"))
		for i := range c {
			c[i] = filepath.Base(c[i])
		}
		src := source{fset: token.NewFileSet(), pkg: p.name(), vars: map[string]bool{}}
		for _, name := range slices.Concat(files, c) {
			data, err := os.ReadFile(filepath.Join(p.Dir, name))
			if errors.Is(err, os.ErrNotExist) {
				continue // being edited
			} else if err != nil {
				t.Fatal(err)
			}
			if generated.Match(data) {
				continue
			}
			src.lines(name, data)
			if strings.HasSuffix(name, ".go") {
				if err := src.parse(name, data); err != nil {
					t.Error(err)
				}
			}
		}
		for _, problem := range src.check() {
			t.Errorf("%s/%s", p.name(), problem)
		}
	}
}

// source checks the files of one package.
type source struct {
	fset     *token.FileSet
	pkg      string
	files    []*ast.File
	tests    []*ast.File
	vars     map[string]bool // package-level variables outside tests
	problems []string
}

func (s *source) lines(name string, data []byte) {
	const most = 500
	if n := bytes.Count(data, []byte("\n")); n > most {
		s.problems = append(s.problems, fmt.Sprintf("%s: %d lines, more than %d: split it", name, n, most))
	}
}

func (s *source) parse(name string, data []byte) error {
	f, err := parser.ParseFile(s.fset, name, data, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	if strings.HasSuffix(name, "_test.go") {
		s.tests = append(s.tests, f)
	} else {
		s.files = append(s.files, f)
	}
	return nil
}

func (s *source) problem(at ast.Node, format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf("%v: ", s.fset.Position(at.Pos()))+fmt.Sprintf(format, args...))
}

func (s *source) check() []string {
	forTests := in(s.pkg, "test", "internal/testkit")
	for _, f := range s.files {
		s.variables(f)
	}
	for _, f := range s.files {
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Recv == nil && n.Name.Name == "init" {
					s.problem(n, "no init functions: the caller says when")
				}
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && !forTests && !in(s.pkg, "cmd") &&
					(x.Name == "os" && n.Sel.Name == "Exit" || x.Name == "log" && strings.HasPrefix(n.Sel.Name, "Fatal")) {
					s.problem(n, "%s.%s outside cmd: return the error", x.Name, n.Sel.Name)
				}
			case *ast.AssignStmt:
				if n.Tok != token.DEFINE {
					for _, lhs := range n.Lhs {
						s.written(lhs)
					}
				}
			case *ast.IncDecStmt:
				s.written(n.X)
			case *ast.UnaryExpr:
				if n.Op == token.AND {
					s.written(n.X)
				}
			}
			return true
		})
	}
	s.testFiles()
	return s.problems
}

// variables collects the package-level variables of a file and rejects the ones that can only exist
// to be changed. It accepts sentinel errors, regular expressions, embedded files, counters, pools
// (nothing may depend on their content) and tables that no code writes to.
func (s *source) variables(f *ast.File) {
	for _, d := range f.Decls {
		decl, ok := d.(*ast.GenDecl)
		if !ok || decl.Tok != token.VAR {
			continue
		}
		for _, spec := range decl.Specs {
			v := spec.(*ast.ValueSpec)
			for _, name := range v.Names {
				s.vars[name.Name] = name.Name != "_"
				if len(v.Values) == 0 && !embedded(f) && !counter(v.Type) {
					s.problem(name, "package-level variable %s without a value: keep state in a type", name)
				}
			}
			for _, value := range v.Values {
				if changeable(value) {
					s.problem(value, "package-level variable that is made to be changed: keep state in a type")
				}
			}
		}
	}
}

// counter reports whether a type is an atomic integer: such a variable numbers names that must be
// unique within the process.
func counter(typ ast.Expr) bool {
	sel, ok := typ.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	from, ok := sel.X.(*ast.Ident)
	return ok && from.Name == "atomic" && (strings.HasPrefix(sel.Sel.Name, "Int") || strings.HasPrefix(sel.Sel.Name, "Uint"))
}

// embedded reports whether a file may have go:embed directives. The files are parsed without
// comments, so it looks for the import that the directive needs.
func embedded(f *ast.File) bool {
	return slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"embed"` })
}

// changeable reports whether a value makes sense only if it changes later.
func changeable(value ast.Expr) bool {
	switch v := value.(type) {
	case *ast.UnaryExpr:
		return v.Op == token.AND
	case *ast.CallExpr:
		name, ok := v.Fun.(*ast.Ident)
		return ok && (name.Name == "make" || name.Name == "new")
	case *ast.CompositeLit:
		typ, ok := v.Type.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		from, ok := typ.X.(*ast.Ident)
		return ok && (from.Name == "sync" && typ.Sel.Name != "Pool" || from.Name == "atomic")
	}
	return false
}

// written reports an expression that writes to a package-level variable, or takes its address. A
// local variable of the same name counts too: rename it.
func (s *source) written(expr ast.Expr) {
	at := expr
	for {
		switch e := expr.(type) {
		case *ast.IndexExpr:
			expr = e.X
			continue
		case *ast.SelectorExpr:
			expr = e.X
			continue
		case *ast.Ident:
			if s.vars[e.Name] {
				s.problem(at, "package-level variable %s is written to: keep state in a type", e.Name)
			}
		}
		return
	}
}

// testFiles checks the rules for test files.
func (s *source) testFiles() {
	var root ast.Node
	checked := false
	for _, f := range s.tests {
		ast.Inspect(f, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, _ := sel.X.(*ast.Ident)
			kit := x != nil && x.Name == "testkit"
			switch sel.Sel.Name {
			case "Skip", "Skipf", "SkipNow":
				if !kit {
					s.problem(sel, "a skip that is not accounted for: call testkit.Skip")
				}
			case "NeedRoot", "NetNS", "Cgroup":
				if kit {
					root = sel
				}
			case "Main", "Run":
				checked = checked || kit
			}
			return true
		})
	}
	if root != nil && !checked {
		s.problem(root, "tests that change the host need the leak check: func TestMain(m *testing.M) { testkit.Main(m) }")
	}
}

func TestSourceChecks(t *testing.T) {
	for _, tt := range []struct {
		name, file, text, want string
	}{
		{"init", "a.go", "package a\nfunc init() {}\n", "a.go:2:1: no init"},
		{"method init", "a.go", "package a\ntype t int\nfunc (t) init() {}\n", ""},
		{"exit", "a.go", "package a\nimport \"os\"\nfunc f() { os.Exit(1) }\n", "a.go:3:12: os.Exit"},
		{"fatal", "a.go", "package a\nimport \"log\"\nfunc f() { log.Fatalf(\"\") }\n", "log.Fatalf"},
		{"sentinel", "a.go", "package a\nimport \"errors\"\nvar ErrA = errors.New(\"a\")\n", ""},
		{"table", "a.go", "package a\nvar units = map[string]int{\"k\": 1}\nfunc f() int { return units[\"k\"] }\n", ""},
		{"table written", "a.go", "package a\nvar units = map[string]int{}\nfunc f() { units[\"k\"] = 1 }\n", "units is written to"},
		{"counter", "a.go", "package a\nvar n = 0\nfunc f() { n++ }\n", "n is written to"},
		{"address", "a.go", "package a\nvar n = 0\nfunc f() *int { return &n }\n", "n is written to"},
		{"no value", "a.go", "package a\nvar n int\n", "without a value"},
		{"serial", "a.go", "package a\nvar n atomic.Int64\nfunc f() { n.Add(1) }\n", ""},
		{"lock", "a.go", "package a\nvar mu sync.Mutex\n", "without a value"},
		{"embed", "a.go", "package a\nimport _ \"embed\"\n//go:embed x\nvar x []byte\n", ""},
		{"pointer", "a.go", "package a\nvar p = &struct{}{}\n", "made to be changed"},
		{"interface check", "a.go", "package a\ntype i interface{}\nvar _ i = (*int)(nil)\n", ""},
		{"skip", "a_test.go", "package a\nfunc f(t T) { t.Skip() }\n", "call testkit.Skip"},
		{"accounted skip", "a_test.go", "package a\nfunc f(t T) { testkit.Skip(t, \"\") }\n", ""},
		{"root without check", "a_test.go", "package a\nfunc f(t T) { testkit.NeedRoot(t) }\n", "need the leak check"},
		{"root with check", "a_test.go", "package a\nfunc f(t T) { testkit.NeedRoot(t) }\nfunc TestMain(m M) { testkit.Main(m) }\n", ""},
		{"long", "a.go", "package a\n" + strings.Repeat("\n", 500), "501 lines"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := source{fset: token.NewFileSet(), pkg: "a", vars: map[string]bool{}}
			s.lines(tt.file, []byte(tt.text))
			if err := s.parse(tt.file, []byte(tt.text)); err != nil {
				t.Fatal(err)
			}
			got := strings.Join(s.check(), "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
