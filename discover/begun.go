package discover

import (
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"golang.org/x/sys/unix"
)

// begins is the pause between checks for the first process of a container being set up.
const begins = 10 * time.Millisecond

// begun adds the records of created containers whose first process exists: the runtime sets up the
// cgroup and networks around it before it executes the program. wait reports that a container has a
// cgroup but no such process yet; one in the host's PID namespace is found only once it runs.
func (r *rounds) begun(reports []reported) (wait bool) {
	type place struct{ source, created int }
	at := make(map[string]place)
	for i, rep := range reports {
		for n, rec := range rep.created {
			at[rec.RuntimeID] = place{i, n}
		}
	}
	if len(at) == 0 {
		r.early = nil
		return false
	}
	before := r.early
	r.early = make(map[string]int)
	for _, rep := range reports {
		for _, rec := range rep.records {
			dir := rec.CgroupV2
			m := engineScope.FindStringSubmatch(filepath.Base(dir))
			if m == nil || !expected(dir) {
				continue
			}
			p, created := at[m[2]]
			if !created {
				continue
			}
			pid := before[dir]
			if pid == 0 || errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
				pid = initIn(r.cfg.Proc, dir)
			}
			if pid == 0 {
				wait = true
				continue
			}
			r.early[dir] = pid
			rec = reports[p.source].created[p.created]
			rec.PID = pid
			reports[p.source].records = append(slices.Clip(reports[p.source].records), rec)
		}
	}
	return wait
}

// initIn finds the process directly in the cgroup dir that is the first in its PID namespace. The
// runtime creates it last, and it later executes the program. 0: there is none.
func initIn(proc, dir string) int {
	pids, _ := cgroup.Procs(dir, maxProcs)
	for _, pid := range pids {
		b, _ := readSmall(filepath.Join(proc, strconv.Itoa(pid), "status"))
		_, rest, _ := strings.Cut(string(b), "\nNSpid:")
		line, _, _ := strings.Cut(rest, "\n")
		if inside := strings.Fields(line); len(inside) > 1 && inside[len(inside)-1] == "1" {
			return pid
		}
	}
	return 0
}
