package vm

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Mark is a top-level test with a mark of package testkit.
type Mark struct{ Test, Mark string }

// A mark is the first statement of its test.
var (
	mark   = regexp.MustCompile(`\btestkit\.(?:Smoke|OnKernels|InFull)\(`)
	marked = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\) \{\n\ttestkit\.(Smoke|OnKernels|InFull)\(t\)$`)
)

// marks reads the marks of the tests below root, by folder relative to it, in the order of the tests'
// names. A mark at another place is an error.
func marks(root string) (map[string][]Mark, error) {
	all := make(map[string][]Mark)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base := d.Name(); d.IsDir() && path != root && (base == "testdata" || base == "build" || strings.HasPrefix(base, ".")) {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found := marked.FindAllStringSubmatch(string(text), -1)
		if n := len(mark.FindAll(text, -1)); n != len(found) {
			return fmt.Errorf("%s: %d of %d marks are not the first statement of a top-level test", path, n-len(found), n)
		}
		rel, err := filepath.Rel(root, filepath.Dir(path))
		for _, m := range found {
			all[rel] = append(all[rel], Mark{m[1], m[2]})
		}
		return err
	})
	for _, tests := range all {
		slices.SortFunc(tests, func(a, b Mark) int { return strings.Compare(a.Test, b.Test) })
	}
	return all, err
}
