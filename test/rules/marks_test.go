package rules

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/test/marks"
)

// TestMarks checks that every kernel runs a test for each BPF object, each kind of knob and each
// path of a packet.
func TestMarks(t *testing.T) {
	const top = "../.."
	marked, err := marks.Tree(top)
	if err != nil {
		t.Fatal(err)
	}
	wanted, err := wantedMarks(top)
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range uncovered(wanted, marked) {
		t.Error(problem)
	}
}

// wantedMarks returns the words that the marks must name.
func wantedMarks(top string) (wanted []string, err error) {
	err = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "build" || d.Name() == ".git"):
			return fs.SkipDir
		case strings.HasSuffix(path, "_bpfel.o"):
			rel, err := filepath.Rel(top, filepath.Dir(path))
			if word := "bpf:" + rel; !slices.Contains(wanted, word) { // a folder may have several
				wanted = append(wanted, word)
			}
			return err
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	kinds, err := knobKinds(filepath.Join(top, "kernel"))
	for _, k := range kinds {
		wanted = append(wanted, "knob:"+k)
	}
	for _, p := range marks.Paths() {
		wanted = append(wanted, "path:"+p)
	}
	return wanted, err
}

// knobKinds returns the kinds of knobs that kernel.Opener opens: the values of the constants
// PACKAGE.KindNAME that kernel/kernel.go uses.
func knobKinds(dir string) (kinds []string, err error) {
	fset := token.NewFileSet()
	opener, err := parser.ParseFile(fset, filepath.Join(dir, "kernel.go"), nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	opened := make(map[string]bool) // "PACKAGE.KindNAME"
	ast.Inspect(opener, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok && strings.HasPrefix(sel.Sel.Name, "Kind") {
			if x, ok := sel.X.(*ast.Ident); ok && sel.Sel.Name != "Kind" {
				opened[x.Name+"."+sel.Sel.Name] = true
			}
		}
		return true
	})
	files, err := filepath.Glob(filepath.Join(dir, "*", "*.go"))
	if err != nil {
		return nil, err
	}
	for _, name := range files {
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, id := range spec.Names {
				if !opened[f.Name.Name+"."+id.Name] || i >= len(spec.Values) {
					continue
				}
				if lit, ok := spec.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					value, _ := strconv.Unquote(lit.Value) // the parser has read it
					kinds = append(kinds, value)
				}
			}
			return true
		})
	}
	if len(kinds) != len(opened) || len(kinds) == 0 {
		return nil, fmt.Errorf("kernel.Opener opens %d kinds of knobs, and %d have a value: %v", len(opened), len(kinds), kinds)
	}
	return kinds, nil
}

// uncovered lists what no testkit.Smoke covers, and the marks that name nothing.
func uncovered(wanted []string, marked map[string][]marks.Test) (problems []string) {
	smoked := make(map[string]bool)
	for _, dir := range slices.Sorted(maps.Keys(marked)) {
		for _, test := range marked[dir] {
			for _, word := range test.Covers {
				if !slices.Contains(wanted, word) {
					problems = append(problems, fmt.Sprintf("%s %s: covers %s, which there is not", dir, test.Name, word))
				}
				smoked[word] = smoked[word] || test.Mark == "Smoke"
			}
		}
	}
	for _, word := range wanted {
		if !smoked[word] {
			problems = append(problems, fmt.Sprintf("no test with testkit.Smoke covers %s", word))
		}
	}
	return problems
}

func TestUncovered(t *testing.T) {
	marked := map[string][]marks.Test{"kernel/a": {
		{Name: "TestA", Mark: "Smoke", Covers: []string{"knob:file"}},
		{Name: "TestB", Mark: "OnKernels", Covers: []string{"knob:group", "knob:old"}},
	}}
	got := uncovered([]string{"knob:file", "knob:group"}, marked)
	want := []string{"kernel/a TestB: covers knob:old, which there is not", "no test with testkit.Smoke covers knob:group"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
