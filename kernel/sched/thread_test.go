package sched

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

// task writes proc/TID of a process or, with PF_KTHREAD, of a kernel thread.
func task(t *testing.T, proc string, tid int, comm string, flags, start uint64, cg string) {
	t.Helper()
	for name, text := range map[string]string{
		"comm":   comm + "\n",
		"stat":   fmt.Sprintf("%d (%s) S 2 0 0 0 -1 %d 0 0 0 0 150 50 0 0 20 0 1 0 %d 0 0\n", tid, comm, flags, start),
		"cgroup": cg,
	} {
		testkit.Write(t, filepath.Join(proc, fmt.Sprint(tid), name), text)
	}
}

func names(list []Named) string {
	var s []string
	for _, n := range list {
		s = append(s, fmt.Sprintf("%d@%d=%s", n.TID, n.Start, n.Comm))
	}
	slices.Sort(s)
	return strings.Join(s, " ")
}

func TestThreads(t *testing.T) {
	proc := t.TempDir()
	task(t, proc, 2, "kthreadd", pfKthread, 0, "0::/\n")
	task(t, proc, 50, "napi/eth0-8193", pfKthread, 777, "0::/\n")
	task(t, proc, 51, "napi/veth0a1b2c3d4-1", pfKthread, 778, "0::/\n")
	task(t, proc, 52, "kworker/0:1", pfKthread, 5, "0::/\n")
	task(t, proc, 53, "napi/fake", 0, 5, "0::/\n") // a process with the same name
	for _, list := range []string{"", "50 51 52 53 ", "50 51 52 53 99"} {
		if list != "" { // without this file, every process is examined
			testkit.Write(t, filepath.Join(proc, "2/task/2/children"), list)
		}
		for prefix, want := range map[string]string{
			"napi/":                "50@777=napi/eth0-8193 51@778=napi/veth0a1b2c3d4-1",
			"napi/eth0-":           "50@777=napi/eth0-8193",
			"napi/veth0a1b2c3d4-2": "",
			"napi/x":               "",
		} {
			got, err := Threads(proc, prefix)
			if err != nil || names(got) != want {
				t.Errorf("children %q, prefix %q: %q, %v; want %q", list, prefix, names(got), err, want)
			}
		}
	}
	task(t, proc, 2, "sh", 0, 0, "0::/\n")
	testkit.Is(t, "in a container's proc", testkit.Err(Threads(proc, "")), ErrHidden)
	testkit.Is(t, "in an empty proc", testkit.Err(Threads(t.TempDir(), "")), ErrHidden)
}

func TestFind(t *testing.T) {
	proc := t.TempDir()
	task(t, proc, 7, "napi/a) b (c", pfKthread, 42, "")
	task(t, proc, 8, "sh", 0, 42, "")
	if got, err := Find(proc, 7); err != nil || got != (Thread{7, 42}) {
		t.Errorf("got %v, %v", got, err)
	}
	testkit.Is(t, "a process", testkit.Err(Find(proc, 8)), errNotKernel)
	testkit.Is(t, "no process", testkit.Err(Find(proc, 9)), journal.ErrGone)
	os.WriteFile(filepath.Join(proc, "7/schedstat"), []byte("1500000000 1 2\n"), 0o644)
	testkit.Gives(t, "usage", Usage{1500 * time.Millisecond, 1, 2})(UsageOf(proc, Thread{7, 42}))
}

func TestOpenKnob(t *testing.T) {
	proc, root := t.TempDir(), t.TempDir()
	l := cgroup.Layout{V2: root, CPU: root, Mode: cgroup.ModeV2}
	task(t, proc, 7, "napi/eth0-1", pfKthread, 42, "0::/pod/c1\n")
	task(t, proc, 8, "sh", 0, 42, "0::/pod/c1\n")
	k, err := OpenKnob(proc, l, journal.Ref{Kind: "kthread", Object: "7:42:" + root})
	must(t, err)
	testkit.Gives(t, "Read", filepath.Join(root, "pod/c1"))(k.Read())
	testkit.Same(t, "ref", (journal.Ref{Kind: "kthread", Object: "7:42:" + root}), k.Ref())
	for _, c := range []struct {
		kind, object string
		is           error
	}{
		{"kthread", "7:41:" + root, journal.ErrGone},
		{"kthread", "9:42:" + root, journal.ErrGone},
		{"kthread", "8:42:" + root, errNotKernel},
		{"affinity", "8:42", errNotKernel},
		{"affinity", "7:41", journal.ErrGone},
		{"affinity", "7:42:" + root, nil},
		{"affinity", "7", nil},
		{"affinity", "-7:42", nil},
		{"affinity", "x:42", nil},
		{"affinity", "7:x", nil},
		{"affinity", "99999999999:1", nil},
		{"kthread", "7:42", nil},
		{"file", "7:42", nil},
	} {
		_, err := OpenKnob(proc, l, journal.Ref{Kind: c.kind, Object: c.object})
		if err == nil || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s %s: %v", c.kind, c.object, err)
		}
	}

	// v2: the thread is moved by cgroup.procs, and only into an existing directory of the
	// hierarchy.
	other := filepath.Join(root, "other")
	os.MkdirAll(other, 0o755)
	os.WriteFile(filepath.Join(other, "cgroup.procs"), nil, 0o644)
	os.Symlink(other, filepath.Join(root, "link"))
	testkit.Check(t, k.Write(other))
	if b, _ := os.ReadFile(filepath.Join(other, "cgroup.procs")); string(b) != "7" {
		t.Errorf("cgroup.procs holds %q", b)
	}
	for _, bad := range []string{"", "/", "/etc", root + "/../x", root + "//other", other + "/", filepath.Join(root, "link"), root + "x", filepath.Join(root, "none")} {
		if err := k.Write(bad); err == nil || errors.Is(err, journal.ErrGone) {
			t.Errorf("moved to %q: %v", bad, err)
		}
	}
	testkit.Fails(t, "a hierarchy that is not mounted was read", testkit.Err(Group(proc, l, Thread{7, 42}, "/elsewhere").Read()))
	task(t, proc, 7, "napi/eth0-1", pfKthread, 43, "0::/pod/c1\n") // the tid is reused
	testkit.Is(t, "write to another thread", k.Write(other), journal.ErrGone)
	testkit.Is(t, "read of another thread", testkit.Err(k.Read()), journal.ErrGone)
}

func TestParseStat(t *testing.T) {
	const rest = " S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000 200 18446744073709551615"
	for _, tc := range []struct {
		name, in string
		want     Stat
		ok       bool
	}{
		{"plain", "7 (sh)" + rest, Stat{Start: 12345, cpu: 11}, true},
		{"hostile name", "7 (a) R 9 9) 9 (x)" + rest, Stat{Start: 12345, cpu: 11}, true},
		{"newline in name", "7 (a\nb)" + rest, Stat{Start: 12345, cpu: 11}, true},
		{"ended", "7 (a) b) R) Z 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000 200", Stat{Ended: true, Start: 12345, cpu: 11}, true},
		{"empty", "", Stat{}, false},
		{"cut off", "7 (sh) S 1 1 1 0 -1 4194560", Stat{}, false},
		{"no number", "7 (sh) S 1 1 1 0 -1 x 1 2 3 4 5 6 7 8 20 0 1 0 12345 1", Stat{}, false},
		{"too late", "7 (sh) S 1 1 1 0 -1 1 1 2 3 4 5 6 7 8 20 0 1 0 18446744073709551615 1", Stat{}, false},
	} {
		got, err := parseStat([]byte(tc.in))
		if got != tc.want || (err == nil) != tc.ok {
			t.Errorf("%s: %+v, %v, want %+v", tc.name, got, err, tc.want)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("3 (pool_workqueue_release) S 2 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 6 0 0\n"))
	f.Add([]byte("3 (a) b) S 2 0 0 0 -1 64 0 0 0 0 1 2 0 0 20 0 1 0 6 0 0"))
	f.Add([]byte("7 (a) b) S 1 1 1 0 -1 x 1 2 3 4 5 6 7 8 20 0 1 0 -1 1000 200"))
	f.Add([]byte("3 (a"))
	f.Add([]byte(")"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, text []byte) {
		if s, err := parseStat(text); err != nil && s != (Stat{}) {
			t.Fatalf("%q: %v with %v", text, s, err)
		} else if time.Duration(s.Start)*(time.Second/ticks) < 0 {
			t.Errorf("start time %d overflows", s.Start)
		}
	})
}
