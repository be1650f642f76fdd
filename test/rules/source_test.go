package rules

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

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
				testkit.Check(t, src.parse(name, data))
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
			must(t, s.parse(tt.file, []byte(tt.text)))
			got := strings.Join(s.check(), "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
