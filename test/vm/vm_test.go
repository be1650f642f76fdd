package vm

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

const (
	fairlead = "github.com/fairlead-project/fairlead"
	guest    = "test/vm/guest" // tests of the guests themselves
)

// TestKernels boots each kernel once and runs there, package by package, the tests that the tier
// asks for. Every tier runs those with testkit.Smoke. The tier CI adds those with testkit.OnKernels
// on the oldest and the newest kernel, and the tier Full adds these and those with testkit.InFull
// on all. On a kernel that fairlead does not support, only those of test/vm/guest with
// testkit.Smoke run.
//
// It takes long, so it needs FAIRLEAD_VM=1. VM_KERNELS and VM_PACKAGES, lists separated by spaces,
// select some of them. VM_RUN is a pattern for -test.run that replaces the marks; VM_BOOT is added
// to the kernel's parameters; VM_CPUS is the number of CPUs of a guest, by default 2.
// build/vm/times has the times of each guest and its slowest tests.
func TestKernels(t *testing.T) {
	if os.Getenv("FAIRLEAD_VM") == "" {
		testkit.Skip(t, "FAIRLEAD_VM is not set; make test and make vm set it")
	}
	tier, err := testkit.ParseTier(os.Getenv(testkit.TierVar))
	must(t, err)
	top, err := filepath.Abs("../..")
	must(t, err)
	tests, err := marks(top)
	must(t, err)
	var kernels []Kernel
	for _, k := range Kernels() {
		if chosen := strings.Fields(os.Getenv("VM_KERNELS")); len(chosen) == 0 && (!k.Slow || tier == testkit.Full) || slices.Contains(chosen, k.Name) {
			kernels = append(kernels, k)
		}
	}
	build := filepath.Join(top, "build/vm")
	cache, err := cacheDir("kernels")
	must(t, err)
	objects, err := objects(top)
	must(t, err)
	var guests []*Guest
	packages := map[string][]string{} // by the architecture of their guests
	for _, k := range kernels {
		g := newGuest(k, filepath.Join(build, k.Name), limits[tier])
		g.Root = Root{Arch: k.Arch, Program: filepath.Join(build, k.Arch, "fairlead"), Tier: tier, Objects: objects, Tests: choose(k, tier, tests)}
		go g.fetch(cache) // while the tests are compiled
		for i, test := range g.Root.Tests {
			g.Root.Tests[i].Binary = filepath.Join(build, k.Arch, "tests", path.Base(test.Package)+".test")
			g.Root.Tests[i].Dir = filepath.Join(top, test.Package)
			packages[k.Arch] = append(packages[k.Arch], fairlead+"/"+test.Package)
		}
		guests = append(guests, g)
	}
	for arch, of := range packages {
		slices.Sort(of)
		goBuild(t, arch, "build", filepath.Join(build, arch, "fairlead"), []string{fairlead + "/cmd/fairlead"})
		// All at once, so that the linker has both CPUs.
		goBuild(t, arch, "test", filepath.Join(build, arch, "tests")+"/", slices.Compact(of), "-c", "-vet=off")
	}
	if t.Failed() {
		return
	}
	// The longest first, so that the CPUs share the rest better at the end.
	order := slices.Clone(guests)
	slices.SortStableFunc(order, func(a, b *Guest) int { return b.Root.size() - a.Root.size() })
	go bootAll(t.Context(), order, runtime.GOMAXPROCS(0))
	var took strings.Builder
	for _, g := range guests {
		t.Run(g.Kernel.Name, func(t *testing.T) {
			<-g.ended
			if errors.Is(g.err, ErrNoKernel) {
				testkit.Skip(t, strings.Join(strings.Fields(g.err.Error()), " "))
			} else if g.err != nil {
				t.Fatal(g.err)
			}
			fmt.Fprintf(&took, "%5.0f s, %.0f of CPU  %s, %d tests of %d packages\n", g.took.Seconds(), g.result.CPU.Seconds(), g.Kernel.Name, g.Root.size(), len(g.Root.Tests))
			times := onKernel(t, g)
			slices.SortFunc(times, func(a, b testTime) int { return int(1000*b.seconds) - int(1000*a.seconds) })
			for _, x := range times[:min(slowest, len(times))] {
				fmt.Fprintf(&took, "%13.1f s  %s\n", x.seconds, x.name)
			}
		})
	}
	t.Logf("times of the guests\n%s", took.String())
	testkit.Check(t, os.WriteFile(filepath.Join(build, "times"), []byte(took.String()), 0o644))
}

// objects finds the committed BPF objects.
func objects(top string) (found []string, err error) {
	err = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && path == filepath.Join(top, "build") {
			return fs.SkipDir
		}
		if err == nil && strings.HasSuffix(path, "_bpfel.o") {
			found = append(found, path)
		}
		return err
	})
	return found, err
}

// slowest is the number of tests of each guest that are listed with their times.
const slowest = 5

// testTime is the time of a top-level test in a guest, in seconds.
type testTime struct {
	name    string
	seconds float64
}

// limits is how long a guest may take, by tier: far longer than it does, because a machine may be
// slow.
var limits = map[testkit.Tier]time.Duration{testkit.Quick: 12 * time.Minute, testkit.CI: 45 * time.Minute, testkit.Full: 75 * time.Minute}

// choose returns the tests that a kernel runs, by package, without their binaries.
func choose(k Kernel, tier testkit.Tier, tests map[string][]Mark) []Test {
	upTo := tier
	if k.Slow || tier == testkit.CI && !k.Whole {
		upTo = testkit.Quick
	}
	from := map[string]testkit.Tier{"Smoke": testkit.Quick, "OnKernels": testkit.CI, "InFull": testkit.Full}
	var chosen []Test
	if k.TooOld {
		upTo, tests = testkit.Quick, map[string][]Mark{guest: tests[guest]}
	}
	for _, pkg := range slices.Sorted(maps.Keys(tests)) {
		t := Test{Package: pkg}
		for _, m := range tests[pkg] {
			if from[m.Mark] <= upTo {
				t.Names = append(t.Names, m.Test)
			}
		}
		if len(t.Names) > 0 {
			chosen = append(chosen, t)
		}
	}
	run, packages := os.Getenv("VM_RUN"), strings.Fields(os.Getenv("VM_PACKAGES"))
	if len(packages) > 0 {
		chosen = slices.DeleteFunc(chosen, func(t Test) bool { return !slices.Contains(packages, t.Package) })
		for _, p := range packages { // without a mark, too
			if run != "" && !slices.ContainsFunc(chosen, func(t Test) bool { return t.Package == p }) {
				chosen = append(chosen, Test{Package: p})
			}
		}
	}
	for i := range chosen {
		if run != "" {
			chosen[i].Names, chosen[i].Run = nil, run
		}
	}
	return chosen
}

// onKernel reports each test of a guest as a subtest, and returns how long the top-level ones took.
func onKernel(t *testing.T, g *Guest) (times []testTime) {
	t.Logf("Linux %s: %d packages in %s", g.result.Release, len(g.result.Runs), g.took.Round(time.Second))
	for _, note := range g.result.Notes {
		t.Log(note)
	}
	if len(g.Root.Tests) == 0 {
		t.Errorf("VM_PACKAGES=%q names no package with a test for this kernel; write feature/traffic", os.Getenv("VM_PACKAGES"))
	}
	for _, test := range g.Root.Tests {
		t.Run(test.Package, func(t *testing.T) {
			run, ok := g.result.Runs[test.name()]
			if !ok {
				t.Fatal("did not start")
			}
			for _, o := range report(t, test, run) {
				if !strings.Contains(o.test, "/") {
					times = append(times, testTime{test.Package + " " + o.test, o.seconds})
				}
			}
		})
	}
	if !g.result.Done {
		console, _ := os.ReadFile(filepath.Join(g.Dir, "console.log"))
		t.Errorf("the guest did not run to its end; its console:\n%s", tail(console, 40))
	}
	return times
}

// report turns the output of a test binary into subtests with its results, and returns the results.
func report(t *testing.T, test Test, r Run) []outcome {
	ended, rest, err := r.outcomes()
	must(t, err)
	failed := false
	for _, o := range ended {
		failed = failed || o.action == "fail"
		t.Run(o.test, func(t *testing.T) {
			switch o.action {
			case "fail":
				t.Error("\n" + o.output)
			case "skip":
				_, reason, ok := strings.Cut(o.output, "accounted skip: "+o.test+": ")
				if !ok {
					t.Fatalf("skipped without a reason\n%s", o.output)
				}
				reason, _, _ = strings.Cut(reason, "\n")
				testkit.Skip(t, reason)
			}
		})
	}
	if len(ended) == 0 {
		t.Errorf("ran no test of %q", test.pattern())
	}
	if r.Status != "0" && !(failed && r.completed()) {
		t.Errorf("ended with status %q\n%s", r.Status, tail([]byte(rest), 60))
	}
	return ended
}

// goBuild builds static binaries for an architecture. Builds of longer tests go first. It may fail t.
func goBuild(t *testing.T, arch, verb, to string, packages []string, flags ...string) bool {
	t.Helper()
	cmd := exec.Command("nice", slices.Concat([]string{"-n", "5", "go", verb}, flags, []string{"-ldflags=-s -w", "-o", to}, packages)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("go %s %s: %v\n%s", verb, strings.Join(packages, " "), err, out)
	}
	return err == nil
}

func TestParse(t *testing.T) {
	got, err := parse(strings.NewReader("noise\r\n@@@ no module /modules/x.ko\r\n@@@ kernel 6.1\r\n" +
		"@@@ begin a\r\n\x16=== RUN   TestA\r\nno line end@@@ end a 0\r\n@@@ begin b\r\nhalf"))
	must(t, err)
	want := Result{
		Release: "6.1",
		Notes:   []string{"no module /modules/x.ko"},
		Runs: map[string]Run{
			"a": {Output: []byte("\x16=== RUN   TestA\nno line end\n"), Status: "0"},
			"b": {Output: []byte("half\n")},
		},
	}
	testkit.Same(t, "result", want, got)
}

// What a guest runs depends on the tier, the kernel and the marks.
func TestChoose(t *testing.T) {
	t.Setenv("VM_RUN", "")
	t.Setenv("VM_PACKAGES", "")
	tests := map[string][]Mark{
		"feature/a": {{"TestA", "Smoke"}, {"TestB", "OnKernels"}, {"TestD", "InFull"}},
		"kernel/b":  {{"TestC", "OnKernels"}},
		guest:       {{"TestGuest", "Smoke"}, {"TestPod", "OnKernels"}},
	}
	own, whole := Test{Package: guest, Names: []string{"TestGuest"}}, Test{Package: guest, Names: []string{"TestGuest", "TestPod"}}
	smoke := []Test{{Package: "feature/a", Names: []string{"TestA"}}, own}
	most := []Test{{Package: "feature/a", Names: []string{"TestA", "TestB"}}, {Package: "kernel/b", Names: []string{"TestC"}}, whole}
	all := []Test{{Package: "feature/a", Names: []string{"TestA", "TestB", "TestD"}}, {Package: "kernel/b", Names: []string{"TestC"}}, whole}
	for _, tt := range []struct {
		kernel Kernel
		tier   testkit.Tier
		want   []Test
	}{
		{Kernel{}, testkit.Quick, smoke},
		{Kernel{Whole: true}, testkit.Quick, smoke},
		{Kernel{}, testkit.CI, smoke},
		{Kernel{Whole: true}, testkit.CI, most},
		{Kernel{}, testkit.Full, all},
		{Kernel{TooOld: true}, testkit.Full, []Test{own}},
		{Kernel{Slow: true}, testkit.Full, smoke},
	} {
		testkit.Same(t, fmt.Sprintf("%+v, %v", tt.kernel, tt.tier), tt.want, choose(tt.kernel, tt.tier, tests))
	}
}

// TestMarks reads the marks of this project: every kernel runs a story of each feature.
func TestMarks(t *testing.T) {
	tests, err := marks("../..")
	must(t, err)
	features, err := filepath.Glob("../../feature/*/README.md")
	if err != nil || len(features) == 0 {
		t.Fatalf("features %v, %v", features, err)
	}
	for _, readme := range features {
		feature := strings.TrimPrefix(filepath.Dir(readme), "../../")
		smoked := false
		for dir, all := range tests {
			below := dir == feature || strings.HasPrefix(dir, feature+"/")
			smoked = smoked || below && slices.ContainsFunc(all, func(m Mark) bool { return m.Mark == "Smoke" })
		}
		if !smoked {
			t.Errorf("%s has no test with testkit.Smoke", feature)
		}
	}
}

// A mark that is not the first statement of a test is an error.
func TestMisplaced(t *testing.T) {
	for text, want := range map[string]bool{
		"func TestA(t *testing.T) {\n\ttestkit.Smoke(t)\n}\n":        false,
		"func TestA(t *testing.T) {\n\tf()\n\ttestkit.Smoke(t)\n}\n": true,
		"func f(t *testing.T) {\n\ttestkit.InFull(t)\n}\n":           true,
	} {
		if _, err := marks(testkit.Tree(t, map[string]string{"a_test.go": text})); (err != nil) != want {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestFetchUnknown asks for a suite that no mirror has.
func TestFetchUnknown(t *testing.T) {
	if os.Getenv("FAIRLEAD_VM") == "" {
		testkit.Skip(t, "FAIRLEAD_VM is not set; make test and make vm set it")
	}
	if _, err := (Kernel{Name: "none", Suite: "no-such-suite", Arch: runtime.GOARCH}).Cached(t.TempDir()); !errors.Is(err, ErrNoKernel) {
		t.Errorf("got %v, want ErrNoKernel", err)
	}
}
