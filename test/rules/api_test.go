package rules

import (
	"errors"
	"flag"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/api.txt anew")

// exported lists what other packages can name in p, one per line, sorted: the package's
// identifiers, and the fields and methods of its types. Values of constants are not listed.
func exported(p *types.Package) (lines []string) {
	short := func(other *types.Package) string {
		if other == p {
			return ""
		}
		return other.Path()
	}
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for _, name := range p.Scope().Names() {
		switch o := p.Scope().Lookup(name).(type) {
		case *types.TypeName:
			if !o.Exported() {
				continue
			}
			if o.IsAlias() {
				add("type %s = %s", name, types.TypeString(types.Unalias(o.Type()), short))
				continue
			}
			under := o.Type().Underlying()
			switch under := under.(type) {
			case *types.Struct:
				add("type %s struct", name)
				for f := range under.Fields() {
					if f.Exported() {
						add("field %s.%s %s", name, f.Name(), types.TypeString(f.Type(), short))
					}
				}
			case *types.Interface:
				add("type %s interface", name)
				for m := range under.Methods() {
					add("method (%s) %s%s", name, m.Name(), signature(m, short))
				}
			default:
				add("type %s %s", name, types.TypeString(under, short))
			}
			if named, ok := o.Type().(*types.Named); ok {
				for m := range named.Methods() {
					if m.Exported() {
						add("method (%s) %s%s", types.TypeString(m.Signature().Recv().Type(), short), m.Name(), signature(m, short))
					}
				}
			}
		case *types.Func:
			if o.Exported() {
				add("func %s%s", name, signature(o, short))
			}
		case *types.Const:
			if o.Exported() {
				add("const %s %s", name, types.TypeString(o.Type(), short))
			}
		case *types.Var:
			if o.Exported() {
				add("var %s %s", name, types.TypeString(o.Type(), short))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// signature returns a function's parameters and results, without the parameters' names, which
// callers do not see.
func signature(f *types.Func, short types.Qualifier) string {
	nameless := func(t *types.Tuple) *types.Tuple {
		var vars []*types.Var
		for v := range t.Variables() {
			vars = append(vars, types.NewParam(token.NoPos, nil, "", v.Type()))
		}
		return types.NewTuple(vars...)
	}
	s := f.Signature()
	s = types.NewSignatureType(nil, nil, nil, nameless(s.Params()), nameless(s.Results()), s.Variadic())
	return strings.TrimPrefix(types.TypeString(s, short), "func")
}

// load imports a package of the module from the compiler's export data.
func load(t *testing.T, path string) *types.Package {
	t.Helper()
	out, err := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}", path).Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	files := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		name, file, _ := strings.Cut(strings.TrimSpace(line), "\t")
		files[name] = file
	}
	open := func(path string) (io.ReadCloser, error) {
		if files[path] == "" {
			return nil, errors.New("no export data")
		}
		return os.Open(files[path])
	}
	p, err := importer.ForCompiler(token.NewFileSet(), "gc", open).Import(path)
	must(t, err)
	return p
}

// TestAPI fails if an exported name of package api was removed or has another type. The diff of
// testdata/api.txt shows a reviewer what an -update changes.
func TestAPI(t *testing.T) {
	const golden = "testdata/api.txt"
	is := exported(load(t, module+"/api"))
	if *update {
		must(t, os.WriteFile(golden, []byte(strings.Join(is, "\n")+"\n"), 0o644))
	}
	data, err := os.ReadFile(golden)
	must(t, err)
	was := strings.Split(strings.TrimSpace(string(data)), "\n")
	for _, line := range was {
		if !slices.Contains(is, line) { // which breaks callers
			t.Errorf("api: is gone or has another type: %s", line)
		}
	}
	for _, line := range is {
		if !slices.Contains(was, line) { // its later removal would not be noticed
			t.Errorf("api: is not recorded: %s", line)
		}
	}
	if t.Failed() {
		t.Log("if that is meant: go test ./test/rules -run API -update, and a line in CHANGELOG.md")
	}
}
