package sched

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// BeNice sets the nice value of all threads of this process; later threads inherit it. 0 changes
// nothing. Where the kernel groups the tasks of a session for the scheduler (autogroup, see
// sched(7)), nice counts only inside a session: there the process becomes a session of its own,
// with that value.
func BeNice(n int) error {
	if n == 0 {
		return nil
	}
	if _, err := unix.Setsid(); err != nil && err != unix.EPERM { // EPERM: it is a session leader already
		return fmt.Errorf("begin a session: %w", err)
	}
	err := os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(n)), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("set nice value %d of the session: %w", n, err)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if err := unix.Setpriority(unix.PRIO_PROCESS, tid, n); err != nil && err != unix.ESRCH {
			return fmt.Errorf("set nice value %d: %w", n, err)
		}
	}
	return nil
}
