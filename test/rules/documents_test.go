package rules

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// maxReadme is the maximum number of lines of a feature's README. The rest belongs in DESIGN.md
// beside it, or in docs/limits.md and docs/measured.md.
const maxReadme = 80

// readmes checks the READMEs in the folder feature, at any depth: each feature has one, and none is
// longer than maxReadme lines.
func readmes(features fs.FS) (problems []string, err error) {
	folders, err := fs.Glob(features, "*")
	if err != nil {
		return nil, err
	}
	for _, folder := range folders {
		if info, err := fs.Stat(features, folder); err != nil {
			return nil, err
		} else if !info.IsDir() {
			continue
		}
		if _, err := fs.Stat(features, path.Join(folder, "README.md")); errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, fmt.Sprintf("feature/%s has no README.md", folder))
		} else if err != nil {
			return nil, err
		}
	}
	err = fs.WalkDir(features, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "README.md" {
			return err
		}
		data, err := fs.ReadFile(features, name)
		if err != nil {
			return err
		}
		if n := strings.Count(strings.TrimSuffix(string(data), "\n"), "\n") + 1; n > maxReadme {
			problems = append(problems, fmt.Sprintf("feature/%s has %d lines, more than %d: DESIGN.md beside it, docs/limits.md and docs/measured.md hold the rest", name, n, maxReadme))
		}
		return nil
	})
	return problems, err
}

func TestReadmes(t *testing.T) {
	problems, err := readmes(os.DirFS("../../feature"))
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}
}

func TestReadmeRule(t *testing.T) {
	text := func(lines int) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte(strings.Repeat("a line\n", lines))}
	}
	open := text(80)
	open.Data = append(open.Data, "a last line without an end"...)
	for _, tt := range []struct {
		name  string
		files fstest.MapFS
		want  []string
	}{
		{"at the limit", fstest.MapFS{"disk/README.md": text(80), "disk/queue/README.md": text(80)}, nil},
		{"beyond it", fstest.MapFS{"disk/README.md": text(81)}, []string{"feature/disk/README.md has 81 lines"}},
		{"a last line without an end", fstest.MapFS{"disk/README.md": open}, []string{"feature/disk/README.md has 81 lines"}},
		{"below a feature", fstest.MapFS{"disk/README.md": text(1), "disk/queue/README.md": text(132)}, []string{"feature/disk/queue/README.md has 132 lines"}},
		{"none", fstest.MapFS{"disk/disk.go": text(1), "disk/queue/README.md": text(1)}, []string{"feature/disk has no README.md"}},
		{"other documents", fstest.MapFS{"disk/README.md": text(1), "disk/DESIGN.md": text(500)}, nil},
		{"files beside the features", fstest.MapFS{"feature.go": text(500)}, nil},
	} {
		got, err := readmes(tt.files)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(got, tt.want, strings.HasPrefix) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// link finds the targets of a Markdown document's links.
var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// dangling lists the relative links of all documents below root that have no target.
func dangling(root fs.FS) (problems []string, err error) {
	err = fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (name == ".git" || name == "build"):
			return fs.SkipDir
		case path.Ext(name) != ".md":
			return nil
		}
		data, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		for i, text := range strings.Split(string(data), "```") {
			for _, m := range link.FindAllStringSubmatch(text, -1) {
				target, heading, _ := strings.Cut(m[1], "#")
				if i%2 != 0 || strings.Contains(target, ":") {
					continue // code, or another host
				}
				file := name
				if target != "" {
					file = path.Join(path.Dir(name), target)
				}
				if !leads(root, file, heading) {
					problems = append(problems, fmt.Sprintf("%s: the link to %s leads nowhere", name, m[1]))
				}
			}
		}
		return nil
	})
	return problems, err
}

var (
	headings = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	unlinked = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// leads reports whether there is a file, and a heading in it that a link reaches by that name.
func leads(root fs.FS, file, heading string) bool {
	if heading == "" {
		_, err := fs.Stat(root, file)
		return err == nil
	}
	text, err := fs.ReadFile(root, file)
	return err == nil && slices.ContainsFunc(headings.FindAllSubmatch(text, -1), func(m [][]byte) bool {
		return strings.ReplaceAll(unlinked.ReplaceAllString(strings.ToLower(string(m[1])), ""), " ", "-") == heading
	})
}

// TestLinks checks that relative links have a target, in the tree and where make install puts the
// documents.
func TestLinks(t *testing.T) {
	dir := t.TempDir()
	install := exec.Command("make", "-C", "../..", "--no-print-directory", "install-docs", "DESTDIR="+dir, "PREFIX=/usr")
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, root := range map[string]string{"the tree": "../..", "as installed": dir + "/usr/share/doc/fairlead"} {
		problems, err := dangling(os.DirFS(root))
		if err != nil {
			t.Fatal(err)
		}
		for _, problem := range problems {
			t.Errorf("%s: %s", name, problem)
		}
	}
}

func TestDangling(t *testing.T) {
	got, err := dangling(fstest.MapFS{
		"README.md":   {Data: []byte("[a](docs/a.md#a-b) [here](#b) [far](https://example.com/x) [gone](docs/b.md)\n```\n[code](none)\n```\n")},
		"docs/a.md":   {Data: []byte("# A `b`!\n[up](../README.md) [beside](c.md)\n")},
		"docs/c.html": {Data: []byte("[no](document)")},
	})
	want := []string{"README.md: the link to #b leads nowhere", "README.md: the link to docs/b.md leads nowhere", "docs/a.md: the link to c.md leads nowhere"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}
