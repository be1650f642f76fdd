package rules

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// maxPlaces is how many places outside its folder a new feature may touch.
const maxPlaces = 6

// place is a row of CONTRIBUTING's list of the places that a new feature touches, with its number
// and its files. NAME in these stands for the feature. A row without a number does not count: the
// laboratory is not part of the agent.
var (
	place      = regexp.MustCompile("(?m)^\\| (\\d*) ?\\| (`[^|]+`) \\|")
	placeFiles = regexp.MustCompile("`([^`]+)`")
)

// places reads the rows from CONTRIBUTING's section on features, and counts them.
func places(contributing string) (list []string, rows int) {
	_, section, _ := strings.Cut(contributing, "\n## Adding a feature\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, m := range place.FindAllStringSubmatch(section, -1) {
		if m[1] != "" {
			rows++
		}
		for _, file := range placeFiles.FindAllStringSubmatch(m[2], -1) {
			list = append(list, file[1])
		}
	}
	return list, rows
}

// isPlace reports whether a file is at one of the places, for any of the names. A place that ends
// in a slash is a folder with everything below it.
func isPlace(list, names []string, file string) bool {
	for _, p := range list {
		for _, name := range names {
			p := strings.ReplaceAll(p, "NAME", name)
			if strings.HasSuffix(p, "/") && strings.HasPrefix(file, p) {
				return true
			}
			if ok, err := path.Match(p, file); ok || err != nil {
				return true
			}
		}
	}
	return false
}

// goFile is a Go file of the module.
type goFile struct {
	path string // below the module
	*ast.File
}

// naming lists where files outside the places name a feature: by an import; by a string that is or
// begins with its name, as routes, metrics and policy keys do; or by an identifier that contains
// its name and that its own files declare.
func naming(fset *token.FileSet, files []goFile, names, list []string) (problems []string) {
	called := make(map[string]string) // identifiers, with the feature
	for _, f := range files {
		own := func(name string) bool { return strings.HasPrefix(path.Base(f.path), name) }
		i := slices.IndexFunc(names, own)
		if i < 0 {
			continue
		}
		for _, id := range declared(f.File) {
			if strings.Contains(strings.ToLower(id), names[i]) {
				called[id] = names[i]
			}
		}
	}
	word := regexp.MustCompile(`(?i)^(fairlead[._]|/v1/(containers/\{ref\}/)?)?(` + strings.Join(names, "|") + `)([._/-]\S*)?$`)
	imported := regexp.MustCompile(`/(?:feature|cmd/fairlead)/(` + strings.Join(names, "|") + `)(/|$)`)
	for _, f := range files {
		if isPlace(list, names, f.path) {
			continue
		}
		ast.Inspect(f.File, func(n ast.Node) bool {
			name := ""
			switch n := n.(type) {
			case *ast.Ident:
				name = called[n.Name]
			case *ast.BasicLit:
				text, err := strconv.Unquote(n.Value)
				if n.Kind != token.STRING || err != nil {
					break
				}
				if m := word.FindStringSubmatch(text); m != nil {
					name = strings.ToLower(m[3])
				} else if m := imported.FindStringSubmatch(text); m != nil {
					name = m[1]
				}
			}
			if name != "" {
				at := fset.Position(n.Pos())
				problems = append(problems, fmt.Sprintf("%s:%d names the feature %s", f.path, at.Line, name))
			}
			return true
		})
	}
	return problems
}

// declared lists a file's package-level identifiers and methods.
func declared(f *ast.File) (ids []string) {
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			ids = append(ids, d.Name.Name)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					ids = append(ids, s.Name.Name)
				case *ast.ValueSpec:
					for _, id := range s.Names {
						ids = append(ids, id.Name)
					}
				}
			}
		}
	}
	return ids
}

// TestFeatureIsAFolder checks that only the places listed in CONTRIBUTING name a feature outside
// its folder.
func TestFeatureIsAFolder(t *testing.T) {
	data, err := os.ReadFile("../../CONTRIBUTING.md")
	must(t, err)
	list, rows := places(string(data))
	if rows == 0 || rows > maxPlaces {
		t.Errorf("CONTRIBUTING.md lists %d places that a new feature touches: %q; the most is %d", rows, list, maxPlaces)
	}
	var names []string
	var files []goFile
	fset := token.NewFileSet()
	for _, p := range packages(t) {
		if name, ok := strings.CutPrefix(p.name(), "feature/"); ok {
			if !strings.Contains(name, "/") {
				names = append(names, name)
			}
			continue
		}
		if in(p.name(), "test", "internal", "cmd/internal/verbtest") {
			continue
		}
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			must(t, err)
			files = append(files, goFile{path.Join(p.name(), name), f})
		}
	}
	if len(names) < 2 {
		t.Fatalf("features: %q", names)
	}
	for _, problem := range naming(fset, files, names, list) {
		t.Errorf("%s, and is none of the places for that in CONTRIBUTING.md", problem)
	}
}

func TestNaming(t *testing.T) {
	const doc = "## Who\n\n| 1 | `elsewhere/` | no |\n\n## Adding a feature\n\n| | place | what |\n| --- | --- | --- |\n" +
		"| 1 | `agent/features.go` | a |\n| 2 | `api/NAME.go`, `api/routes.go` | `b` |\n| 3 | `cmd/NAME/`, `cmd/verbs.go` | c |\n| | `lab/` | d |\n\n## Next\n\n| 1 | `metrics/` | no |\n"
	list, rows := places(doc)
	if want := []string{"agent/features.go", "api/NAME.go", "api/routes.go", "cmd/NAME/", "cmd/verbs.go", "lab/"}; rows != 3 || !slices.Equal(list, want) {
		t.Fatalf("places %q in %d rows, want %q in 3", list, rows, want)
	}
	const own = "package api\ntype Disk struct{}\nconst Free = 1\nfunc (c *Client) Disk() {}\nfunc diskRoutes() {}\n"
	for _, tt := range []struct{ file, text, want string }{
		{"agent/agent.go", "import _ \"example.com/feature/disk\"", "agent/agent.go:2 names the feature disk"},
		{"agent/agent.go", "import _ \"example.com/feature/disk/model\"", "names the feature disk"},
		{"agent/features.go", "import _ \"example.com/feature/disk\"", ""},
		{"agent/agent.go", "func f(s string) bool { return s == \"disk_reads_total\" }", "agent/agent.go:2"},
		{"agent/agent.go", "const k = \"fairlead.disk\"", "agent/agent.go:2"},
		{"agent/agent.go", "const k = \"fairlead.disk.weight\"", "agent/agent.go:2"},
		{"api/client.go", "const k = \"/v1/containers/{ref}/disk\"", "api/client.go:2"},
		{"api/client.go", "const k = \"/v1/disk\"", "api/client.go:2"},
		{"api/routes.go", "const k = \"/v1/disk\"", ""},
		{"cmd/ps.go", "const head = \"DISK\"", "cmd/ps.go:2"},
		{"cmd/ps.go", "const text = \"the disk of a container\"", ""},
		{"cmd/ps.go", "const text = \"diskette\"", ""},
		{"cmd/ps.go", "// disk is a feature.", ""},
		{"api/route.go", "type b interface { Disk() }", "api/route.go:2"},
		{"api/types.go", "type s struct { D *Disk }", "api/types.go:2"},
		{"api/route.go", "var r = diskRoutes", "api/route.go:2"},
		{"api/route.go", "var r = Free", ""},
		{"cmd/disk/table.go", "const k = \"fairlead.disk\"", ""},
		{"cmd/tape/tape.go", "const k = \"fairlead.disk\"", ""}, // another feature's own
		{"cmd/disktable.go", "const k = \"fairlead.disk\"", "cmd/disktable.go:2"},
		{"cmd/verbs.go", "import _ \"example.com/cmd/fairlead/disk\"", ""},
		{"cmd/ps.go", "import _ \"example.com/cmd/fairlead/disk\"", "cmd/ps.go:2"},
		{"lab/load/disk.go", "const k = \"disk\"", ""},
		{"metrics/rules.go", "const k = \"disk\"", "metrics/rules.go:2"},
	} {
		fset := token.NewFileSet()
		var files []goFile
		for name, text := range map[string]string{"api/disk.go": own, tt.file: "package x\n" + tt.text + "\n"} {
			f, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
			must(t, err)
			files = append(files, goFile{name, f})
		}
		got := naming(fset, files, []string{"disk", "tape"}, list)
		if len(got) > 1 || (len(got) == 1) != (tt.want != "") || tt.want != "" && !strings.Contains(got[0], tt.want) {
			t.Errorf("%s: %s: %q, want %q", tt.file, tt.text, got, tt.want)
		}
	}
}
