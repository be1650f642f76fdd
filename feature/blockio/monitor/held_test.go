package monitor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// waits returns how long one container waited because of a culprit, which may be none.
func (r Reading) waits(victim, culprit container.ID) (all Wait) {
	for _, w := range r.Waits {
		if w.Victim == victim && w.Culprit == culprit {
			return w
		}
	}
	return Wait{Victim: victim, Culprit: culprit}
}

// limit gives a cgroup a hundredth of a CPU, less than it gets on a busy host.
func limit(t *testing.T, cg testkit.CG) {
	t.Helper()
	if cg.CPU == "" {
		testkit.Skip(t, "no cpu controller")
	}
	quota, value := cgroup.Quota(cg.CPU, cg.CPU == cg.V2, time.Millisecond, 100*time.Millisecond)
	if err := quota.Write(value); err != nil {
		testkit.Skip(t, "no quotas: "+err.Error())
	}
}

// heldBack waits until the victim has waited for its limit, and checks that the culprit that ran
// meanwhile is not blamed.
func heldBack(t *testing.T, m *Meter, victim, culprit, by container.ID) {
	t.Helper()
	r := until(t, m, "the victim is throttled", func(r Reading) bool { return r.waits(victim, by).For > 100*time.Millisecond })
	if own, others := r.waits(victim, by).For, r.waits(victim, culprit).For; others > own/2 {
		t.Errorf("throttled for %v, and the other is blamed for %v", own, others)
	}
}

// A container without remaining quota waits for no other container, however many threads it has and
// whoever runs meanwhile. The same holds for a quota of a parent group.
func TestOwnQuota(t *testing.T) {
	testkit.InFull(t)
	for _, above := range []bool{false, true} {
		t.Run(fmt.Sprintf("above %v", above), func(t *testing.T) {
			victim, culprit := newTenant(t, true), newTenant(t, false)
			cg := victim.CG
			if above {
				cg = cg.Child(t, "container")
			}
			culprit.run(t, culprit.CG, 0, "burn")
			for range 4 {
				victim.run(t, cg, 0, "burn")
			}
			limit(t, victim.CG) // only now: with the limit they would take long to begin
			m := newMeter(t, victim.Group, culprit.Group)
			heldBack(t, m, victim.Container, culprit.Container, decide.Quota)
		})
	}
}

// realtime makes all threads of a process real-time.
func realtime(t *testing.T, pid int, attr unix.SchedAttr) {
	t.Helper()
	attr.Size = unix.SizeofSchedAttr
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	must(t, err)
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		must(t, err)
		must(t, unix.SchedSetAttr(tid, &attr, 0))
	}
}

// A container without remaining real-time budget waits for no other.
func TestOwnRealtime(t *testing.T) {
	testkit.InFull(t)
	t.Run("group", func(t *testing.T) {
		victim, culprit := newTenant(t, true), newTenant(t, false)
		budget := filepath.Join(victim.CPU, "cpu.rt_runtime_us")
		if _, err := os.Stat(budget); err != nil {
			testkit.Skip(t, "no real-time groups of cgroup v1")
		}
		must(t, os.WriteFile(filepath.Join(victim.CPU, "cpu.rt_period_us"), []byte("100000"), 0))
		must(t, os.WriteFile(budget, []byte("10000"), 0))
		culprit.run(t, culprit.CG, 0, "burn")
		_, pid := topology.InGroup(t, victim.CG, 0, "burn")
		realtime(t, pid, unix.SchedAttr{Policy: unix.SCHED_RR, Priority: 1})
		m := newMeter(t, victim.Group, culprit.Group) // only now: until then it waited as others do
		heldBack(t, m, victim.Container, culprit.Container, decide.Realtime)
	})
	t.Run("deadline", func(t *testing.T) {
		victim, culprit := newTenant(t, true), newTenant(t, false)
		for cpu := range runtime.NumCPU() {
			culprit.run(t, culprit.CG, cpu, "burn")
		}
		_, pid := topology.InGroup(t, victim.CG, -1, "burn")
		realtime(t, pid, unix.SchedAttr{Policy: unix.SCHED_DEADLINE, Flags: unix.SCHED_FLAG_RESET_ON_FORK, Runtime: 2e6, Deadline: 20e6, Period: 20e6})
		m := newMeter(t, victim.Group, culprit.Group)
		heldBack(t, m, victim.Container, culprit.Container, decide.Realtime)
	})
}

// Tasks in cgroups below a container's are attributed to it at any depth, on CPUs and on disks.
func TestDeepCulprit(t *testing.T) {
	testkit.InFull(t)
	l, disk := newLoop(t)
	victim, culprit := newTenant(t, true), newTenant(t, false)
	deep := culprit.CG
	for i := range 30 {
		deep = deep.Child(t, strconv.Itoa(i))
	}
	m := newMeter(t, victim.Group, culprit.Group)
	culprit.run(t, deep, 0, "burn")
	culprit.run(t, deep, 0, "disk", "--to", l.Path, "--size", "4096")
	victim.run(t, victim.CG, 0, "burn")
	until(t, m, "the victim waits for the culprit, which does I/O", func(r Reading) bool {
		return r.waits(victim.Container, culprit.Container).For > 10*time.Millisecond && r.account(culprit.Container, disk).Reads > 0
	})
}

// Waits of threads that do I/O are counted apart from waits of other threads.
func TestWaitsForIO(t *testing.T) {
	testkit.InFull(t)
	l, _ := newLoop(t)
	reader, spinner, culprit := newTenant(t, true), newTenant(t, true), newTenant(t, false)
	m := newMeter(t, reader.Group, spinner.Group, culprit.Group)
	culprit.run(t, culprit.CG, 0, "burn")
	spinner.run(t, spinner.CG, 0, "burn")
	reader.run(t, reader.CG, 0, "disk", "--to", l.Path, "--size", "4096")
	r := until(t, m, "both wait", func(r Reading) bool {
		return r.waits(reader.Container, culprit.Container).IO > 20*time.Millisecond && r.waits(spinner.Container, culprit.Container).For > 100*time.Millisecond
	})
	for _, w := range r.Waits {
		if w.IO > w.For || w.Victim == spinner.Container && w.IO > w.For/4 {
			t.Errorf("%+v: more for I/O than there can be", w)
		}
	}
}

// A container that is only shown takes no room from one with a reservation.
func TestRoomOfReserved(t *testing.T) {
	looked, culprit := newTenant(t, true), newTenant(t, false)
	reserved := newTenant(t, true)
	at := decide.Disk{Major: 1 << 20, Minor: 1}
	reserved.Reserved = []decide.Disk{at}
	m := newMeter(t, looked.Group, reserved.Group, culprit.Group)
	var w monitorWait
	for i := range m.objs.Shown.MaxEntries() {
		must(t, m.objs.Shown.Put(&monitorPair{Victim: 1, Culprit: uint64(i)}, &w))
	}
	culprit.run(t, culprit.CG, 0, "burn")
	reserved.run(t, reserved.CG, 0, "burn")
	looked.run(t, looked.CG, 0, "burn")
	until(t, m, "there is room for who has reserved something, and none for the other", func(r Reading) bool {
		return r.waits(reserved.Container, culprit.Container).For > 0 && r.Lost.Pairs > 0
	})

	// The room runs out for other containers first.
	var all []Group
	for i := range m.objs.Watched.MaxEntries() {
		all = append(all, Group{Container: container.ID(1<<40 + uint64(i)), V2: 1<<40 + uint64(i), Watched: true})
	}
	testkit.Fails(t, "no error, though there is no room for all", m.Follow(append(all, culprit.Group, reserved.Group)))
	if is := m.watched[reserved.Container]; !is {
		t.Error("who has reserved something is not watched")
	}
	r, err := m.Read()
	must(t, err)
	if r.waits(reserved.Container, culprit.Container).For == 0 {
		t.Error("its waits are forgotten")
	}

	must(t, m.objs.Accounts.Delete(&monitorPlace{Cgroup: reserved.Group.IO, Major: at.Major, Minor: at.Minor}))
	var a monitorAccount
	for i := range m.objs.Accounts.MaxEntries() {
		err := m.objs.Accounts.Put(&monitorPlace{Cgroup: culprit.Group.IO, Major: 1 << 20, Minor: 2 + i}, &a)
		if !errors.Is(err, unix.E2BIG) { // it is full: something does I/O
			must(t, err)
		}
	}
	must(t, m.Follow([]Group{culprit.Group, reserved.Group}))
	if r, err = m.Read(); err != nil || len(r.Accounts) != int(m.objs.Accounts.MaxEntries()) ||
		!slices.ContainsFunc(r.Accounts, func(a Account) bool { return a.Container == reserved.Container && a.Disk == at }) {
		t.Errorf("%d accounts, want as many as there is room for, and that of who has reserved something: %v", len(r.Accounts), err)
	}
}
