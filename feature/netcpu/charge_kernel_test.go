package netcpu

import (
	"log/slog"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// burn starts a process that computes in a cgroup, on all CPUs or on some, until the
// test ends or stop is called.
func burn(t *testing.T, cg testkit.CG, cpus ...int) (stop func()) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "read x; while :; do :; done")
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	stop = sync.OnceFunc(func() { cmd.Process.Kill(); cmd.Wait() })
	t.Cleanup(stop)
	cg.Add(t, cmd.Process.Pid)
	if len(cpus) > 0 {
		var set unix.CPUSet
		for _, cpu := range cpus {
			set.Set(cpu)
		}
		must(t, unix.SchedSetaffinity(cmd.Process.Pid, &set))
	}
	_, err = in.Write([]byte("go\n"))
	must(t, err)
	return stop
}

// uses tells how much of its time in so many periods a cgroup ran, in parts of a
// CPU, while do is called as each of them begins.
func uses(t *testing.T, cg testkit.CG, n uint64, do func()) float64 {
	t.Helper()
	read := func() (uint64, time.Duration) {
		p, err := cgroup.ReadPeriods(cg.CPU)
		must(t, err)
		u, err := cgroup.Usage(cg.V2)
		must(t, err)
		return p.Count, u
	}
	next := func() (uint64, time.Duration) {
		was, _ := read()
		for {
			if count, used := read(); count != was {
				return count, used
			}
			time.Sleep(200 * time.Microsecond)
		}
	}
	first, before := next()
	for {
		do()
		count, after := next()
		if count >= first+n {
			return float64(after-before) / float64(100*time.Millisecond) / float64(count-first)
		}
	}
}

// load stands for packets that cost so many CPUs.
type load struct {
	mu   sync.Mutex
	cpus float64
	from time.Time
	sum  time.Duration
}

func (l *load) set(cpus float64) {
	l.cost()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cpus = cpus
}

func (l *load) cost() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !l.from.IsZero() {
		l.sum += time.Duration(l.cpus * float64(now.Sub(l.from)))
	}
	l.from = now
	return l.sum
}

// TestQuotaWriteRefills shows what everything about the writes rests on: each
// fills the quota anew, even one of the same value, whatever was used of it.
func TestQuotaWriteRefills(t *testing.T) {
	cg := needCPU(t)
	k, value := cgroup.Quota(cg.CPU, cg.CPU == cg.V2, 10*ms, 100*ms)
	must(t, k.Write(value))
	burn(t, cg)
	uses(t, cg, 5, func() {}) // until it has begun
	alone := uses(t, cg, 10, func() {})
	amid := uses(t, cg, 10, func() {
		time.Sleep(40 * time.Millisecond)
		must(t, k.Write(value))
	})
	if amid < 1.4*alone {
		t.Errorf("writes in the middle of periods: %.3f CPUs, without %.3f", amid, alone)
	}
	if q, err := cgroup.ReadBandwidth(cg.CPU); err != nil || q.Quota != 10*ms {
		t.Errorf("%+v, %v", q, err)
	}
}

// TestChargeInKernel charges a container for packets that never were, and sees
// it get so much less, and its own quota back.
func TestChargeInKernel(t *testing.T) {
	cg := needCPU(t)
	const quota = 40 * ms
	k, owners := cgroup.Quota(cg.CPU, cg.CPU == cg.V2, quota, 100*ms)
	must(t, k.Write(owners))
	id, err := cgroup.ID(cg.V2)
	must(t, err)
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	j, err := journal.Open(t.TempDir())
	must(t, err)
	t.Cleanup(func() { j.Close() })

	var packets load
	ch := newCharger(chargeConfig{
		roots: kernel.Default(), layout: layout, journal: j, log: slog.New(slog.DiscardHandler),
		read: func() (map[container.ID]cost, error) {
			return map[container.ID]cost{container.ID(id): {charge: packets.cost()}}, nil
		},
	})
	t.Cleanup(func() { ch.close() })
	must(t, ch.add(container.Container{ID: container.ID(id), Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU}}, 0))
	stop := burn(t, cg)

	uses(t, cg, 5, func() {}) // until it has begun
	before := uses(t, cg, 10, func() {})
	if v, err := k.Read(); err != nil || v != owners {
		t.Errorf("quota is %q with nothing to charge, %v", v, err)
	}
	packets.set(0.2)
	uses(t, cg, 25, func() {})
	during := uses(t, cg, 20, func() {})
	packets.set(0)
	// Some percent may stay away for as long as it runs: where ticks come late, as
	// in an emulated guest, it runs beyond its quota, and pays for that.
	within := func(ok func(v string, quota time.Duration) bool) (back bool) {
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			v, err := k.Read()
			must(t, err)
			b, err := cgroup.ReadBandwidth(cg.CPU)
			must(t, err)
			if back = ok(v, b.Quota); back {
				break
			}
		}
		return back
	}
	if !within(func(_ string, q time.Duration) bool { return q >= quota*9/10 }) {
		t.Errorf("journal %+v with nothing to charge any more", j.Entries())
	}
	after := uses(t, cg, 10, func() {})
	t.Logf("of a CPU: %.3f, charged 0.2: %.3f, afterwards: %.3f", before, during, after)
	// What it ran and what it was charged come to its quota; less where the
	// test has to share the CPUs.
	if during > 0.2*1.15 {
		t.Errorf("%.3f of a CPU beside packets of 0.2, where its quota is 0.4", during)
	}
	// Once it rests, all of it is back.
	stop()
	if !within(func(v string, _ time.Duration) bool { return v == owners && len(j.Entries()) == 0 }) {
		v, err := k.Read()
		t.Errorf("quota is %q, %v, journal %+v", v, err, j.Entries())
	}
	burn(t, cg)

	// Ended while it is charged, the owner's value is back at once.
	packets.set(0.5)
	for range 100 {
		time.Sleep(50 * time.Millisecond)
		if len(j.Entries()) > 0 {
			break
		}
	}
	must(t, ch.close())
	if v, err := k.Read(); err != nil || v != owners || len(j.Entries()) != 0 {
		t.Errorf("quota is %q after close, %v, journal %+v", v, err, j.Entries())
	}
}
