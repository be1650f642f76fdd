package e2e

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// lastVersion is the commit that hosts run until they get this version.
const lastVersion = "e734164"

// TestUpgrade replaces an agent of the last version by this one while containers run under policy.
// After a clean stop all policy comes into force again. What a killed agent leaves is adopted, or
// undone by `fairlead restore`.
func TestUpgrade(t *testing.T) {
	r := newRig(t)
	old := buildLast(t)
	r.add(sandbox.Spec{Name: "e2e-plain"})
	r.add(sandbox.Spec{Name: "e2e-small", CPU: sandbox.CPU{Quota: 20 * time.Millisecond, Period: 100 * time.Millisecond}})
	before := r.state()
	a := r.agent()
	a.policy("isolate.yaml", isolateAll)
	applied := func() {
		t.Helper()
		a.start()
		for _, b := range r.boxes {
			a.isolated(b.Name, 1)
		}
	}

	a.program = old
	applied()
	a.stop()
	a.program = program
	applied()
	r.reachable("under the new agent")
	a.stop()
	r.sameAs(before, "after an upgrade and a clean stop")

	a.program = old
	applied()
	a.kill()
	a.program = program
	applied()
	r.reachable("under an agent that has adopted what was in force")
	a.stop()
	r.sameAs(before, "after a kill, an upgrade and a clean stop")

	a.program = old
	applied()
	a.kill()
	a.program = program
	mustSay(t, a.run("restore", "--state-dir", a.path("state")), 0)
	r.sameAs(before, "after a kill and the new version's restore")
}

// buildLast builds the last version from this repository's history.
func buildLast(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	git := func(args ...string) *exec.Cmd {
		return exec.Command("git", append([]string{"-c", "safe.directory=*", "-C", "../.."}, args...)...)
	}
	if git("cat-file", "-e", lastVersion+"^{commit}").Run() != nil {
		testkit.Skip(t, "no history: the last version cannot be built")
	}
	tree := filepath.Join(dir, "tree.tar")
	for _, cmd := range []*exec.Cmd{
		git("archive", "-o", tree, lastVersion),
		exec.Command("tar", "-xf", tree, "-C", dir),
		exec.Command("go", "build", "-C", dir, "-buildvcs=false", "-o", "fairlead", "./cmd/fairlead"),
	} {
		cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
		}
	}
	return filepath.Join(dir, "fairlead")
}
