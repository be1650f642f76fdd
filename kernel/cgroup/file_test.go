package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

// cpuGroup makes a cgroup of the cpu controller.
func cpuGroup(t *testing.T) testkit.CG {
	t.Helper()
	cg := testkit.Cgroup(t)
	if cg.CPU == "" {
		testkit.Skip(t, "no cpu controller")
	}
	return cg
}

// openHere is an opener of this kernel's knobs.
func openHere(r journal.Ref) (journal.Knob, error) { return Open(DefaultRoot, r) }

func TestFileOnDisk(t *testing.T) {
	root := t.TempDir()
	name := filepath.Join(root, "cpu", "cpu.shares")
	testkit.Write(t, name, "1024\n")
	testkit.Write(t, filepath.Join(root, "cpu", "cpu.idle"), "0\n")
	k, err := Open(root, journal.Ref{Kind: "file", Object: name})
	must(t, err)
	testkit.Gives(t, "Read", "1024")(k.Read())
	testkit.Check(t, k.Write("2048"))
	if b, _ := os.ReadFile(name); string(b) != "2048" {
		t.Errorf("file holds %q", b)
	}
	if k.Ref() != (journal.Ref{Kind: "file", Object: name}) || File(name).Ref() != k.Ref() {
		t.Errorf("ref is %v", k.Ref())
	}
	must(t, os.RemoveAll(filepath.Dir(name)))
	testkit.Is(t, "read of a gone cgroup", testkit.Err(k.Read()), journal.ErrGone)
	testkit.Is(t, "write to a gone cgroup", k.Write("1"), journal.ErrGone)
	testkit.Fails(t, "a file that the write made", testkit.Err(os.Stat(name)))
}

func TestFileRefusals(t *testing.T) {
	base := t.TempDir()
	root := filepath.Join(base, "cgroup")
	secret := filepath.Join(base, "secret")
	testkit.Write(t, secret, "secret")
	testkit.Write(t, filepath.Join(root, "a/cpu.shares"), "1024\n")
	for link, to := range map[string]string{"a/link": secret, "dirlink": filepath.Join(root, "a"), "up": base} {
		must(t, os.Symlink(to, filepath.Join(root, link)))
	}
	must(t, unix.Mkfifo(filepath.Join(root, "a/fifo"), 0o600))
	for kind, objects := range map[string][]string{
		KindFile:   {"", "/", ".", "cpu.shares", root, root + "/", secret, root + "-more/x", root + "/../secret", root + "/a/../a/cpu.shares", root + "//a/cpu.shares"},
		"kthread":  {root + "/a/cpu.shares"},
		KindSlices: {root + "/a/cgroup.procs"},
		KindRT:     {"", "/etc/" + rtFile, root + "/a/tasks", root + "/a"},
		KindLine: {
			"", "io.max 8:0", root + "/io.max", root + "/io.max 8", root + "/io.max 8:0 9:0", root + "/cgroup.procs 8:0", "/etc/io.max 8:0", root + "/../io.max 8:0",
			root + "/io.weight 8:0", root + "/io.max default", root + "/io.cost.qos default", root + "/io.weight",
		},
	} {
		for _, object := range objects {
			if _, err := Open(root, journal.Ref{Kind: kind, Object: object}); err == nil {
				t.Errorf("%s %q was opened below %s", kind, object, root)
			}
		}
	}
	for _, path := range []string{"a/link", "dirlink/cpu.shares", "up/secret", "a", "a/fifo"} {
		k, err := Open(root, journal.Ref{Kind: "file", Object: filepath.Join(root, path)})
		must(t, err)
		if v, err := k.Read(); err == nil || errors.Is(err, journal.ErrGone) {
			t.Errorf("read %s: %q, %v", path, v, err)
		}
		if err := k.Write("x"); err == nil || errors.Is(err, journal.ErrGone) {
			t.Errorf("write %s: %v", path, err)
		}
	}
	if b, _ := os.ReadFile(secret); string(b) != "secret" {
		t.Errorf("secret holds %q", b)
	}
	testkit.Write(t, filepath.Join(root, "a/huge"), strings.Repeat("x", maxValue+1))
	testkit.Fails(t, "a huge file", testkit.Err(File(filepath.Join(root, "a/huge")).Read()))
}

// TestFileInKernel turns and restores the knobs of a real cgroup.
func TestFileInKernel(t *testing.T) {
	testkit.OnKernels(t)
	cg := cpuGroup(t)
	knobs := map[string]string{"cpu.shares": "512", "cpu.cfs_quota_us": "20000"}
	if cg.CPU == cg.V2 {
		knobs = map[string]string{"cpu.weight": "50", "cpu.max": "20000 100000"}
	}
	j := testkit.Journal(t, journal.Open)
	before := map[string]string{}
	for name, value := range knobs {
		k := File(filepath.Join(cg.CPU, name))
		var err error
		if before[name], err = k.Read(); err != nil {
			t.Fatal(err)
		}
		must(t, j.Turn(k, value, journal.Owner{Feature: "test"}))
	}
	if q, limited, err := CPUQuota(cg.CPU); err != nil || !limited || q != 0.2 {
		t.Errorf("quota is %v, %v, %v", q, limited, err)
	}
	if w, err := Weight(cg.CPU); err != nil || fmt.Sprint(w) != knobs["cpu.shares"]+knobs["cpu.weight"] {
		t.Errorf("weight is %v, %v", w, err)
	}
	out, err := j.Restore(openHere, nil)
	if err != nil || len(out) != len(knobs) {
		t.Errorf("restore: %v, %v", out, err)
	}
	for name, want := range before {
		testkit.Gives(t, name, want)(File(filepath.Join(cg.CPU, name)).Read())
	}
	if _, limited, err := CPUQuota(cg.CPU); err != nil || limited {
		t.Errorf("quota after restore: %v, %v", limited, err)
	}

	testkit.Check(t, File(filepath.Join(cg.CPU, "cpu.idle")).Write("1"))
	testkit.Gives(t, "weight of an idle cgroup", uint64(0))(Weight(cg.CPU))

	// A cgroup is removed while the knob is open, and before.
	child := cg.Child(t, "child")
	k := File(filepath.Join(child.CPU, "cgroup.procs"))
	must(t, os.Remove(child.CPU))
	testkit.Is(t, "read", testkit.Err(k.Read()), journal.ErrGone)
	for name, err := range map[string]error{
		"quota": third(CPUQuota(child.CPU)), "weight": second(Weight(child.CPU)), "cpus": second(CPUs(child.CPU)),
	} {
		testkit.Is(t, name+" of a gone cgroup", err, journal.ErrGone)
	}
}

func second[A any](_ A, err error) error        { return err }
func third[A, B any](_ A, _ B, err error) error { return err }

func TestCPUsInKernel(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	l, err := Detect("/proc", "")
	if err != nil || l.CPUSet == "" {
		testkit.Skip(t, "no cpuset controller")
	}
	var set unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &set))
	cpus, err := CPUs(l.CPUSet)
	must(t, err)
	// A process's affinity is a subset of the root's CPUs.
	for i := range 1024 {
		if set.IsSet(i) && !slices.Contains(cpus, i) {
			t.Errorf("CPU %d is not in %v", i, cpus)
		}
	}
	if len(cpus) < set.Count() {
		t.Errorf("%d CPUs, but %d are usable", len(cpus), set.Count())
	}
}

// Kept files show what the kernel counts now, of the cgroup that has the name now.
func TestFiles(t *testing.T) {
	testkit.OnKernels(t)
	cg := testkit.Cgroup(t)
	var f Files
	defer f.Keep(nil)
	quota := func(want float64) {
		t.Helper()
		for _, files := range []*Files{&f, nil} {
			if cpus, limited, err := files.CPUQuota(cg.CPU); cpus != want || limited != (want > 0) || err != nil {
				t.Errorf("files kept: %v; quota of %v CPUs, %v, %v, want %v", files != nil, cpus, limited, err, want)
			}
		}
	}
	quota(0)
	knob, value := Quota(cg.CPU, cg.CPU == cg.V2, 5e7, 1e8)
	testkit.Must(t, knob.Write(value))
	kept := len(f.open)
	quota(0.5)
	if kept == 0 || len(f.open) != kept {
		t.Errorf("%d files are open, before %d", len(f.open), kept)
	}
	testkit.Must(t, os.Remove(cg.CPU))
	if _, _, err := f.CPUQuota(cg.CPU); !errors.Is(err, journal.ErrGone) {
		t.Errorf("the cgroup has gone: %v", err)
	}
	testkit.Must(t, os.Mkdir(cg.CPU, 0o755))
	quota(0)
	testkit.Must(t, os.Remove(cg.CPU))
	testkit.Must(t, os.Mkdir(cg.CPU, 0o755))
	quota(0) // the kept files are of the one before
	f.Keep(map[string]bool{cg.CPU: true})
	testkit.Same(t, "files are open of a directory to keep", kept, len(f.open))
	f.Keep(nil)
	testkit.Same(t, "files are open of no directory", 0, len(f.open))
}

// A host with many containers does not use up the agent's descriptors.
func TestFilesBound(t *testing.T) {
	var f Files
	defer f.Keep(nil)
	root := t.TempDir()
	for i := range maxKept + 10 {
		dir := tree(t, filepath.Join(root, fmt.Sprint(i)), "cpu.stat", fmt.Sprintf("usage_usec %d\n", i))
		for range 2 {
			if d, err := f.Usage(dir); err != nil || d.Microseconds() != int64(i) {
				t.Fatalf("directory %d: %v, %v", i, d, err)
			}
		}
	}
	testkit.Same(t, "files are open", maxKept, len(f.open))
}
