package rules

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
)

// TestVersion builds the version string as make does: in a tree without git, at the release's tag,
// and at another commit.
func TestVersion(t *testing.T) {
	t.Setenv("MAKEFLAGS", "") // a make that runs this test side by side with others has no jobs for it
	dir := t.TempDir()
	for _, name := range []string{"Makefile", "api/version.go"} {
		data, err := os.ReadFile("../../" + name)
		must(t, err)
		to := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(to), 0o755))
		must(t, os.WriteFile(to, data, 0o644))
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	git := func(args ...string) {
		t.Helper()
		run(append([]string{"git", "-c", "user.name=test", "-c", "user.email=test@localhost"}, args...)...)
	}
	version := func(want string) {
		t.Helper()
		got := run("make", "--silent", "version")
		if ok, err := regexp.MatchString("^"+regexp.QuoteMeta(api.Release)+want+"$", got); !ok {
			t.Errorf("version %q, want %s%s (%v)", got, api.Release, want, err)
		}
	}

	version("")
	git("init", "-q")
	git("add", ".")
	git("commit", "-q", "-m", "a release")
	version(`-dev\+[0-9a-f]+`)
	git("tag", "v"+api.Release)
	version("")
	git("commit", "-q", "--allow-empty", "-m", "after it")
	version(`-dev\+v` + regexp.QuoteMeta(api.Release) + `\.1\.g[0-9a-f]+`) // an rpm's version has no dash
}

// TestChangelog fails if the newest section of the changelog does not have the version of the tree.
func TestChangelog(t *testing.T) {
	data, err := os.ReadFile("../../CHANGELOG.md")
	must(t, err)
	m := regexp.MustCompile(`(?m)^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$`).FindSubmatch(data)
	if m == nil || string(m[1]) != api.Release {
		t.Errorf("CHANGELOG.md: newest section %q, want \"## %s - DATE\" or \"- unreleased\"", m, api.Release)
	}
}
