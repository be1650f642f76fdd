package rules

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// maxReadme is the most lines of a feature's README. The rest belongs
// in DESIGN.md, MEASURED.md or LIMITS.md beside it.
const maxReadme = 80

// readmes checks the README of each feature, and of what lies below one, in the
// folder feature: a feature has one, and none is longer than maxReadme lines.
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
			problems = append(problems, fmt.Sprintf("feature/%s has %d lines, more than %d: DESIGN.md, MEASURED.md and LIMITS.md beside it hold the rest", name, n, maxReadme))
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
