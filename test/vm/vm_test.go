package vm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

const (
	fairlead = "github.com/fairlead-project/fairlead"
	guest    = "test/vm/guest" // tests of the guests themselves
)

// TestKernels runs, on each kernel, the tests of every package below these
// folders whose tests use testkit, that is, touch the kernel. It is long, so
// it wants FAIRLEAD_VM=1. VM_KERNELS and VM_PACKAGES, lists separated by
// spaces, choose some of them; VM_RUN is a pattern for -test.run.
//
// How long each guest took is in build/vm/times.
func TestKernels(t *testing.T) {
	if os.Getenv("FAIRLEAD_VM") == "" {
		testkit.Skip(t, "FAIRLEAD_VM is not set; make test and make vm set it")
	}
	build, err := filepath.Abs("../../build/vm")
	if err != nil {
		t.Fatal(err)
	}
	root := Root{Program: filepath.Join(build, "fairlead"), Run: os.Getenv("VM_RUN")}
	goBuild(t, "build", root.Program, fairlead+"/cmd/fairlead")
	root.Tests = compile(t, filepath.Join(build, "tests"), "container", "feature", "internal/testkit", "kernel", "sandbox", guest)
	rounds := map[string][]*Round{}
	missing := map[string]error{}
	var kernels []Kernel
	var queue []*Round
	for _, k := range Kernels() {
		if chosen := strings.Fields(os.Getenv("VM_KERNELS")); len(chosen) > 0 && !slices.Contains(chosen, k.Name) {
			continue
		}
		kernels = append(kernels, k)
		dir := filepath.Join(build, k.Name)
		if root.Kernel, missing[k.Name] = k.Fetch(filepath.Join(dir, "kernel")); missing[k.Name] == nil {
			rounds[k.Name] = Rounds(k, dir, root, 30*time.Minute)
			queue = append(queue, rounds[k.Name]...)
		}
	}
	// A guest keeps one CPU busy, whatever it has itself, and takes a gigabyte.
	times := filepath.Join(build, "times")
	if err := os.Remove(times); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		RunAll(t.Context(), queue, min(runtime.GOMAXPROCS(0), 4))
	}()
	var took strings.Builder
	for _, k := range kernels {
		t.Run(k.Name, func(t *testing.T) {
			if err := missing[k.Name]; errors.Is(err, ErrNoKernel) {
				testkit.Skip(t, strings.Join(strings.Fields(err.Error()), " "))
			} else if err != nil {
				t.Fatal(err)
			}
			for _, r := range rounds[k.Name] {
				<-r.done
				fmt.Fprintf(&took, "%5.0f s  %-8s %s\n", r.took.Seconds(), k.Name, r.Name)
				onKernel(t, r)
			}
		})
	}
	<-ended
	t.Logf("times of the guests\n%s", took.String())
	if err := os.WriteFile(times, []byte(took.String()), 0o644); err != nil {
		t.Error(err)
	}
}

// onKernel reports each test of a guest as a subtest.
func onKernel(t *testing.T, r *Round) {
	if r.err != nil {
		t.Error(r.err)
		return
	}
	t.Logf("Linux %s, %s: %d packages in %s", r.result.Release, r.Name, len(r.result.Runs), r.took.Round(time.Second))
	for _, note := range r.result.Notes {
		t.Log(note)
	}
	if r.againErr != nil {
		t.Logf("what failed could not be run again: %v", r.againErr)
	}
	for _, test := range r.Root.Tests {
		t.Run(test.Package, func(t *testing.T) {
			run, ok := r.result.Runs[test.name()]
			if !ok {
				t.Fatal("did not start")
			}
			report(t, run, r.again.Runs[test.name()])
		})
	}
	if !r.result.Done {
		console, _ := os.ReadFile(filepath.Join(r.dir, "console.log"))
		t.Errorf("the guest did not run to its end; its console:\n%s", tail(console, 40))
	}
}

// report turns the output of a test binary into subtests with its results. What
// failed there and passed when it was run again passes, and says so.
func report(t *testing.T, r, again Run) {
	ended, rest, err := r.outcomes()
	if err != nil {
		t.Fatal(err)
	}
	failed := false
	for _, o := range ended {
		failed = failed || o.action == "fail"
		t.Run(o.test, func(t *testing.T) {
			switch {
			case o.action == "fail" && again.passes(o.test):
				t.Logf("accounted flake: %s\n%s", o.test, o.output)
			case o.action == "fail":
				t.Error("\n" + o.output)
			case o.action == "skip":
				_, reason, ok := strings.Cut(o.output, "accounted skip: "+o.test+": ")
				if !ok {
					t.Fatalf("skipped without a reason\n%s", o.output)
				}
				reason, _, _ = strings.Cut(reason, "\n")
				testkit.Skip(t, reason)
			}
		})
	}
	if r.Status != "0" && !(failed && r.ended()) {
		t.Errorf("ended with status %q\n%s", r.Status, tail([]byte(rest), 60))
	}
}

// compile builds the test binaries of the packages in the folders.
func compile(t *testing.T, dir string, folders ...string) []Test {
	t.Helper()
	const format = `{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}} {{.TestImports}} {{.XTestImports}}{{end}}`
	args := []string{"list", "-e", "-f", format}
	for _, f := range folders {
		args = append(args, fairlead+"/"+f+"/...")
	}
	list, err := exec.Command("go", args...).Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	chosen := strings.Fields(os.Getenv("VM_PACKAGES"))
	var tests []Test
	for line := range strings.Lines(string(list)) {
		f := strings.Fields(line)
		if len(f) < 2 || !strings.Contains(line, fairlead+"/internal/testkit") {
			continue
		}
		test := Test{Package: strings.TrimPrefix(f[0], fairlead+"/"), Dir: f[1]}
		if len(chosen) > 0 && !slices.Contains(chosen, test.Package) {
			continue
		}
		test.Binary = filepath.Join(dir, test.name())
		if goBuild(t, "test", test.Binary, f[0], "-c") {
			tests = append(tests, test)
		}
	}
	if len(tests) == 0 {
		t.Fatal("there is no test to run")
	}
	return tests
}

// goBuild builds a static binary by a verb of go. A failure is t's.
func goBuild(t *testing.T, verb, to, path string, flags ...string) bool {
	t.Helper()
	cmd := exec.Command("go", append(append([]string{verb}, flags...), "-ldflags=-s -w", "-o", to, path)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("go %s %s: %v\n%s", verb, path, err, out)
	}
	return err == nil
}

// tail is the last n lines of a text.
func tail(text []byte, n int) []byte {
	lines := bytes.SplitAfter(bytes.TrimSpace(text), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-n):], nil)
}

func TestParse(t *testing.T) {
	got, err := parse(strings.NewReader("noise\r\n@@@ no module /modules/x.ko\r\n@@@ kernel 6.1\r\n" +
		"@@@ begin a\r\n\x16=== RUN   TestA\r\nno line end@@@ end a 0\r\n@@@ begin b\r\nhalf"))
	if err != nil {
		t.Fatal(err)
	}
	want := Result{
		Release: "6.1",
		Notes:   []string{"no module /modules/x.ko"},
		Runs: map[string]Run{
			"a": {Output: []byte("\x16=== RUN   TestA\nno line end\n"), Status: "0"},
			"b": {Output: []byte("half\n")},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// What fails in a guest is run again, in what it was part of, if it is little.
func TestFailed(t *testing.T) {
	result := func(outputs ...string) Result {
		r := Result{Runs: make(map[string]Run)}
		for i, out := range outputs {
			r.Runs[string(rune('a'+i))] = Run{Output: []byte(strings.ReplaceAll(out, "---", "\x16---") + "\x16FAIL\n"), Status: "1"}
		}
		return r
	}
	all := Root{Program: "p", Run: "Test", Tests: []Test{{Package: "a"}, {Package: "b"}, {Package: "c"}}}
	first := result("--- FAIL: TestA/x (0.1s)\n--- FAIL: TestA (0.1s)\n", "--- PASS: TestA (0.1s)\n", "--- FAIL: TestC (0.1s)\n--- FAIL: TestD (0.1s)\n")
	got, err := all.failed(first)
	if err != nil {
		t.Fatal(err)
	}
	want := Root{Program: "p", Run: "^(TestA|TestC|TestD)$", Tests: []Test{{Package: "a"}, {Package: "c"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got, err := all.failed(result("--- PASS: TestA (0.1s)\n")); err != nil || len(got.Tests) != 0 {
		t.Errorf("all passes: %+v, %v; want nothing", got, err)
	}
	if got, err := all.failed(result(strings.Repeat("--- FAIL: TestA (0.1s)\n", most+1))); err != nil || len(got.Tests) != 0 {
		t.Errorf("much fails: %+v, %v; want nothing", got, err)
	}
	first.Runs["c"] = Run{Output: first.Runs["c"].Output, Status: "2"}
	if got, err := all.failed(first); err != nil || got.Run != "^(TestA)$" {
		t.Errorf("one panics: %+v, %v; want TestA", got, err)
	}
	second := result("--- PASS: TestA (0.1s)\n").Runs["a"]
	if second.passes("TestA/x") {
		t.Error("TestA passes, though its package does not")
	}
	second.Status = "0"
	if !second.passes("TestA/x") || !second.passes("TestA") || second.passes("TestB/x") || (Run{}).passes("TestA") {
		t.Error("want TestA to pass with all that is part of it, and nothing else")
	}
}

// TestArchive compares the archive with what cpio would write: the sizes of
// header, name and data, each padded to four bytes.
func TestArchive(t *testing.T) {
	var out bytes.Buffer
	a := &archive{w: &out}
	a.dir("d")
	a.file("d/f", 0o644, []byte("hello"))
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	want := "070701" + "00000001" + "000041ed" + "00000000" + "00000000" + "00000001" + "00000000" + "00000000" +
		"00000000" + "00000000" + "00000000" + "00000000" + "00000002" + "00000000" + "d\x00" +
		"070701" + "00000002" + "000081a4" + "00000000" + "00000000" + "00000001" + "00000000" + "00000005" +
		"00000000" + "00000000" + "00000000" + "00000000" + "00000004" + "00000000" + "d/f\x00\x00\x00" + "hello\x00\x00\x00"
	if diff := cmp.Diff(want, out.String()[:len(want)]); diff != "" {
		t.Error(diff)
	}
	if a.copy("gone", filepath.Join(t.TempDir(), "gone")); a.close() == nil {
		t.Error("a file that is not there: no error")
	}
}

// TestFetchUnknown asks for a suite that no mirror has.
func TestFetchUnknown(t *testing.T) {
	if os.Getenv("FAIRLEAD_VM") == "" {
		testkit.Skip(t, "FAIRLEAD_VM is not set; make test and make vm set it")
	}
	if _, err := (Kernel{Name: "none", Suite: "no-such-suite"}).Fetch(t.TempDir()); !errors.Is(err, ErrNoKernel) {
		t.Errorf("got %v, want ErrNoKernel", err)
	}
}
