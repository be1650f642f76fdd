package testkit

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Again starts the program of this test once more, with a variable in its environment ("A=b"), and
// waits until it prints "go". kill kills the process, at the latest when t ends, and fails t if the
// process printed more, which says why it ended early.
func Again(t testing.TB, variable string) (pid int, kill func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Stderr = append(os.Environ(), variable), os.Stderr
	out, err := cmd.StdoutPipe()
	Must(t, err)
	lines := bufio.NewScanner(out)
	Must(t, cmd.Start())
	kill = sync.OnceFunc(func() {
		cmd.Process.Kill()
		if lines.Scan() {
			t.Errorf("it ended by itself: %q", lines.Text())
		}
		cmd.Wait()
	})
	t.Cleanup(kill)
	if !lines.Scan() || lines.Text() != "go" {
		t.Fatalf("it says %q", lines.Text())
	}
	return cmd.Process.Pid, kill
}

// CPUTime returns the CPU time of a process so far, by clock_getcpuclockid(3).
func CPUTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	const sched = 2 // CPUCLOCK_SCHED
	var ts unix.Timespec
	Must(t, unix.ClockGettime(int32(^pid)<<3|sched, &ts))
	return time.Duration(ts.Nano())
}

// Resident returns the resident memory of a process in bytes.
func Resident(t testing.TB, pid int) float64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid)) // proc_pid_statm(5)
	Must(t, err)
	var size, pages float64
	fmt.Sscan(string(data), &size, &pages)
	return pages * float64(os.Getpagesize())
}
