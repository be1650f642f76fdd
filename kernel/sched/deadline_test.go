package sched

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// A thread gets its runtime. After its agent is gone, Restore gives it back its policy and nice
// value. Its children are ordinary.
func TestDeadlineInKernel(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	must(t, TryDeadline())
	dir := t.TempDir()
	j, err := journal.Open(dir, "")
	must(t, err)
	cmd := exec.Command("sh", "-c", "read x; sleep 1000 & echo $!; wait")
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	must(t, cmd.Start())
	child := 0
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
		if child > 0 {
			unix.Kill(child, unix.SIGKILL)
		}
	}()
	pid := cmd.Process.Pid
	must(t, unix.Setpriority(unix.PRIO_PROCESS, pid, 7))
	thread, err := FindTask("/proc", pid)
	must(t, err)
	policyOf := func(pid int) string {
		t.Helper()
		th, err := FindTask("/proc", pid)
		must(t, err)
		s, err := Deadline("/proc", th).Read()
		must(t, err)
		return s
	}
	given := FormatDeadline(5*time.Millisecond, 100*time.Millisecond)
	must(t, j.Turn(Deadline("/proc", thread), given, journal.Owner{Feature: "test"}))
	attr, err := unix.SchedGetAttr(pid, 0)
	if err != nil || attr.Policy != unix.SCHED_DEADLINE || attr.Runtime != 5e6 || attr.Period != 1e8 {
		t.Errorf("the thread is %+v, %v", attr, err)
	}
	in.Write([]byte("\n"))
	buf := make([]byte, 20)
	out.(*os.File).SetReadDeadline(time.Now().Add(20 * time.Second)) // the shell retries for ever where it cannot fork
	n, _ := out.Read(buf)
	if child, err = strconv.Atoi(strings.TrimSpace(string(buf[:n]))); err != nil {
		t.Fatal(err)
	}
	testkit.Same(t, "its child", "normal 0", policyOf(child))
	j.Close()

	if j, err = journal.Open(dir, ""); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	res, err := j.Restore(func(r journal.Ref) (journal.Knob, error) { return OpenKnob("/proc", cgroup.Layout{}, r) }, nil)
	if err != nil || len(res) != 1 || res[0].Result != journal.Restored {
		t.Fatalf("%+v, %v", res, err)
	}
	testkit.Same(t, "put back", "normal 7", policyOf(pid))

	// The knob reads a policy that the thread has changed itself.
	must(t, unix.SchedSetAttr(pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_BATCH, Nice: 3}, 0))
	testkit.Same(t, "batch", "batch 3", policyOf(pid))
	stale := Deadline("/proc", Thread{pid, thread.Start + 1})
	testkit.Is(t, "another thread of the same tid was changed", stale.Write(given), journal.ErrGone)
	if err := Deadline("/proc", thread).Write(FormatDeadline(time.Second, 100*time.Millisecond)); err == nil {
		t.Error("more than all time was given")
	}
}

// The kernel refuses a thread that may not use all CPUs, and the error explains it.
func TestDeadlineAffinity(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	pid := testkit.CG{}.Sleeper(t).Pid
	var all, one unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &all))
	if all.Count() < 2 {
		testkit.Skip(t, "one CPU only")
	}
	one.Set(0)
	must(t, unix.SchedSetaffinity(pid, &one))
	thread, err := FindTask("/proc", pid)
	must(t, err)
	err = ExplainDeadline(Deadline("/proc", thread).Write(FormatDeadline(time.Millisecond, time.Second)))
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "all CPUs") {
		t.Errorf("%v", err)
	}
}

func FuzzParseDeadline(f *testing.F) {
	testkit.Seeds(f, "", "normal 0", "batch 3", "deadline 5000000/100000000", "deadline 0/1", "deadline 9/8", "deadline 1/1 ")
	f.Fuzz(func(t *testing.T, s string) {
		if run, period, ok := ParseDeadline(s); ok && (run < minRuntime || run > period || FormatDeadline(run, period) != s) {
			t.Fatalf("%q is %v of %v", s, run, period)
		}
	})
}

func TestOpenDeadline(t *testing.T) {
	proc := t.TempDir()
	task(t, proc, 7, "sh", 0, 42, "")
	task(t, proc, 8, "kworker", pfKthread, 42, "")
	testkit.Check(t, testkit.Err(OpenKnob(proc, cgroup.Layout{}, journal.Ref{Kind: KindDeadline, Object: "7:42"})))
	for object, gone := range map[string]bool{"7:41": true, "9:42": true, "8:42": false, "": false, "7": false, "-7:42": false, "7:42x": false, "07:42": false} {
		_, err := OpenKnob(proc, cgroup.Layout{}, journal.Ref{Kind: KindDeadline, Object: object})
		if err == nil || errors.Is(err, journal.ErrGone) != gone {
			t.Errorf("%q: %v", object, err)
		}
	}
}
