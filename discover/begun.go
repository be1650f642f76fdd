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

// begins is the pause between looks for the first process of a container that a runtime sets up.
const begins = 10 * time.Millisecond

// begun adds to the reports the records of created containers whose first process is there: the runtime
// sets up their cgroups and networks around it, and then has it execute the program. It reports whether some
// have a cgroup and no such process yet; one in the host's PID namespace is known only once it runs.
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

// initIn finds the process in the cgroup dir itself that is the first in a PID namespace of its own, which a
// runtime creates last and then executes the program; 0: there is none.
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
