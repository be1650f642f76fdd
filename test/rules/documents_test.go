package rules

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// maxReadme is the maximum number of lines of a feature's README. The rest belongs in DESIGN.md
// beside it, or in docs/limits.md and docs/measured.md.
const maxReadme = 80

// TestReadmes checks the READMEs in the folder feature, at any depth: each feature has one, and
// none is longer than maxReadme lines.
func TestReadmes(t *testing.T) {
	features := os.DirFS("../../feature")
	folders, err := fs.ReadDir(features, ".")
	must(t, err)
	for _, folder := range folders {
		if _, err := fs.Stat(features, path.Join(folder.Name(), "README.md")); err != nil && folder.IsDir() {
			t.Errorf("feature/%s has no README.md: %v", folder.Name(), err)
		}
	}
	must(t, fs.WalkDir(features, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "README.md" {
			return err
		}
		data, err := fs.ReadFile(features, name)
		if err != nil {
			return err
		}
		if n := strings.Count(strings.TrimSuffix(string(data), "\n"), "\n") + 1; n > maxReadme {
			t.Errorf("feature/%s has %d lines, more than %d: DESIGN.md beside it, docs/limits.md and docs/measured.md hold the rest", name, n, maxReadme)
		}
		return nil
	}))
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

// leads reports whether a file exists, with a heading that a link reaches by this name.
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

// runbook finds the pages that alerts name.
var runbook = regexp.MustCompile(`(?m)runbook_url: https://\S+/blob/main/(\S+)#(\S+)$`)

// Each alert names a section of the runbook.
func TestRunbooks(t *testing.T) {
	root := os.DirFS("../..")
	rules, err := fs.ReadFile(root, "packaging/prometheus/rules.yml")
	must(t, err)
	named := runbook.FindAllSubmatch(rules, -1)
	if alerts := bytes.Count(rules, []byte("- alert: ")); alerts == 0 || alerts != len(named) {
		t.Errorf("%d alerts name %d sections", alerts, len(named))
	}
	for _, m := range named {
		if !leads(root, string(m[1]), string(m[2])) {
			t.Errorf("%s has no section %s", m[1], m[2])
		}
	}
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
		must(t, err)
		for _, problem := range problems {
			t.Errorf("%s: %s", name, problem)
		}
	}
}
