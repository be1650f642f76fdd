// Package marks reads from the source of the tests which of them depend on the kernel, and what
// they cover: the calls of testkit.Smoke, OnKernels and InFull. It runs no test. test/vm uses it to
// choose what a guest runs, test/rules to check that the marks are complete.
package marks

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Test is one top-level test with a mark.
type Test struct {
	Name   string
	Mark   string   // of testkit: "Smoke", "OnKernels" or "InFull"
	Covers []string // "bpf:FOLDER", "knob:KIND" or "path:NAME"
}

// Paths returns the packet paths that marks may name: paths on which fairlead has programs, classes
// or threads.
func Paths() []string {
	return []string{
		"hop",     // one veth, from the host's namespace to the container
		"bridge",  // NIC, bridge, veth
		"polled",  // the same, where the NIC or the veth has a NAPI that polls
		"nat",     // the same, with address translation
		"overlay", // NIC, VXLAN, bridge, veth
		"macvlan", // the container's own device on the NIC
		"host",    // a container in the host's network namespace
		"ifb",     // what an uplink receives, shaped by an IFB
		"queue",   // what an uplink sends, shaped by a qdisc
		"xdp",     // dropped in the NIC's driver
	}
}

// Dir reads the marks of the tests in one folder, in the order of the tests' names. An error names
// the file and the line of an unreadable mark: the mark does not open a top-level test, its
// arguments are not literals, or they name nothing known.
func Dir(dir string) ([]Test, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil, err
	}
	var tests []Test
	for _, name := range files {
		found, err := file(name, nil)
		if err != nil {
			return nil, err
		}
		tests = append(tests, found...)
	}
	slices.SortFunc(tests, func(a, b Test) int { return strings.Compare(a.Name, b.Name) })
	return tests, nil
}

// Tree reads the marks below root, by folder relative to it. Folders without a
// marked test are left out.
func Tree(root string) (map[string][]Test, error) {
	all := make(map[string][]Test)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if base := d.Name(); path != root && (base == "testdata" || base == "build" || strings.HasPrefix(base, ".")) {
			return fs.SkipDir
		}
		tests, err := Dir(path)
		if err != nil || len(tests) == 0 {
			return err
		}
		rel, err := filepath.Rel(root, path)
		all[rel] = tests
		return err
	})
	return all, err
}

// file reads the marks of one file; src is as in go/parser.ParseFile.
func file(name string, src any) ([]Test, error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var tests []Test
	read := make(map[ast.Node]bool)
	for _, d := range f.Decls {
		decl, ok := d.(*ast.FuncDecl)
		if !ok || decl.Recv != nil || decl.Body == nil || len(decl.Body.List) == 0 || !strings.HasPrefix(decl.Name.Name, "Test") {
			continue
		}
		stmt, _ := decl.Body.List[0].(*ast.ExprStmt)
		if stmt == nil {
			continue
		}
		call, name, ok := mark(stmt.X)
		if !ok {
			continue
		}
		read[call] = true
		t := Test{Name: decl.Name.Name, Mark: name}
		for _, arg := range call.Args[1:] {
			word, err := cover(arg)
			if err != nil {
				return nil, fmt.Errorf("%v: mark of %s: %w", fset.Position(arg.Pos()), t.Name, err)
			}
			t.Covers = append(t.Covers, word)
		}
		tests = append(tests, t)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		if call, _, ok := mark(n); ok && !read[call] && err == nil {
			err = fmt.Errorf("%v: a mark is the first statement of a top-level test", fset.Position(n.Pos()))
		}
		return err == nil
	})
	return tests, err
}

// mark reports whether a node calls one of the marks, and which.
func mark(n ast.Node) (call *ast.CallExpr, name string, ok bool) {
	call, ok = n.(*ast.CallExpr)
	if !ok || len(call.Args) == 0 {
		return nil, "", false
	}
	sel, _ := call.Fun.(*ast.SelectorExpr)
	if sel == nil {
		return nil, "", false
	}
	x, _ := sel.X.(*ast.Ident)
	if x == nil || x.Name != "testkit" || !slices.Contains([]string{"Smoke", "OnKernels", "InFull"}, sel.Sel.Name) {
		return nil, "", false
	}
	return call, sel.Sel.Name, true
}

// cover reads one argument of a mark.
func cover(arg ast.Expr) (string, error) {
	lit, _ := arg.(*ast.BasicLit)
	if lit == nil || lit.Kind != token.STRING {
		return "", fmt.Errorf("want a string literal")
	}
	word, err := strconv.Unquote(lit.Value)
	if err != nil {
		return "", err
	}
	kind, name, _ := strings.Cut(word, ":")
	switch {
	case name == "", kind != "bpf" && kind != "knob" && kind != "path":
		return "", fmt.Errorf("%q: want bpf:FOLDER, knob:KIND or path:NAME", word)
	case kind == "path" && !slices.Contains(Paths(), name):
		return "", fmt.Errorf("%q: the paths are %s", word, strings.Join(Paths(), ", "))
	}
	return word, nil
}
