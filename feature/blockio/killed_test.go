package blockio

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
)

// childEnv makes this test binary another program: "agent STATE DEADLINE V2 CPU IO" is an
// agent that gives a container real time until it is killed, "threads N" has so many.
const childEnv = "FAIRLEAD_TEST_CHILD"

func child(role string) {
	args := strings.Split(role, " ")
	err := fmt.Errorf("no role %q", role)
	switch {
	case args[0] == "agent" && len(args) == 6:
		err = childAgent(args[1], args[2] == "true", container.Cgroup{V2: args[3], CPU: args[4], IO: args[5]})
	case args[0] == "threads" && len(args) == 2:
		err = childThreads(args[1])
	}
	fmt.Println(err)
	os.Exit(1)
}

func childAgent(state string, deadline bool, cg container.Cgroup) error {
	j, err := journal.Open(state, "")
	if err != nil {
		return err
	}
	id, err := cgroup.ID(cg.V2)
	if err != nil {
		return err
	}
	c := container.Container{ID: container.ID(id), Cgroup: cg}
	f, err := New(Config{Host: feature.Host{Roots: kernel.Default(), Journal: j, Containers: topology.Containers{c}}, Deadline: deadline})
	if err != nil {
		return err
	}
	t := policy.Target{Container: c, Settings: policy.Settings{Realtime: killedBudget}}
	for said := false; ; said = true {
		if err := f.Apply(context.Background(), t); err != nil && !errors.Is(err, feature.ErrPartly) {
			return err
		}
		if !said {
			fmt.Println("ready")
		}
		if _, err := f.Decide(nil, true); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func childThreads(count string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	debug.SetMaxThreads(2*n + 1000)
	started := make(chan struct{})
	for range n {
		go func() {
			runtime.LockOSThread()
			started <- struct{}{}
			for {
				unix.Pause() // the runtime's signals end it early
			}
		}()
	}
	for range n {
		<-started
	}
	fmt.Println("ready")
	for {
		unix.Pause()
	}
}

// startChild starts this binary in a role and waits until it is ready.
func startChild(t *testing.T, role string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if word, err := bufio.NewReader(out).ReadString('\n'); word != "ready\n" {
		t.Fatalf("%s said %q, %v", role, word, err)
	}
	return cmd
}

// killedBudget is what each CPU gives in each second.
const killedBudget = 20 * time.Millisecond

// A killed agent leaves real-time threads that the kernel bounds, and the journal alone
// makes them ordinary again.
func TestRealtimeKilled(t *testing.T) {
	testkit.InFull(t)
	testkit.NeedRoot(t)
	for _, deadline := range []bool{true, false} {
		way := map[bool]string{true: "deadline", false: "groups"}[deadline]
		t.Run(way, func(t *testing.T) {
			cg := testkit.Cgroup(t)
			if cg.V2 == "" || cg.CPU == "" || cg.IO == "" {
				testkit.Skip(t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
			}
			if _, err := cgroup.RT(cg.CPU).Read(); !deadline && errors.Is(err, errors.ErrUnsupported) {
				testkit.Skip(t, "no real-time groups of cgroup v1")
			}
			spin := cg.Spinner(t)
			policyOf := func() uint32 {
				t.Helper()
				attr, err := unix.SchedGetAttr(spin.Pid, 0)
				must(t, err)
				return attr.Policy
			}
			state := t.TempDir()
			agent := startChild(t, fmt.Sprintf("agent %s %v %s %s %s", state, deadline, cg.V2, cg.CPU, cg.IO))
			must(t, agent.Process.Kill())
			agent.Wait()

			want := uint32(unix.SCHED_RR)
			if deadline {
				want = unix.SCHED_DEADLINE
			}
			testkit.Same(t, "policy", want, policyOf())
			ran, err := sched.Ran("/proc", spin.Pid)
			must(t, err)
			began := time.Now()
			time.Sleep(2 * time.Second)
			now, err := sched.Ran("/proc", spin.Pid)
			must(t, err)
			// Of each CPU a second's budget may be left, and the kernel may see its end a tick
			// late.
			most := time.Duration(runtime.NumCPU()) * (killedBudget*time.Duration(2+time.Since(began)/time.Second) + 100*time.Millisecond)
			if now-ran > most {
				t.Errorf("without an agent the thread ran for %s of %s, more than %s", now-ran, time.Since(began), most)
			}

			j := testkit.JournalIn(t, state, journal.Open)
			_, err = j.Restore(kernel.Opener(kernel.Default()), nil)
			must(t, err)
			if got := policyOf(); got != unix.SCHED_NORMAL || len(j.Entries()) != 0 {
				t.Errorf("after restore: policy %d, %+v", got, j.Entries())
			}
		})
	}
}

// A container of many threads gets its budget for some of them, and no more of the agent's
// work than that takes.
func TestManyThreads(t *testing.T) {
	testkit.NeedRoot(t)
	n := testkit.Scale(t, 1500, 10_000)
	h := newHost(t)
	h.cfg.Deadline = true
	c, cg := h.container("many")
	must(t, h.Apply(t.Context(), target(t, c, "io.realtime: 20ms")))
	many := startChild(t, fmt.Sprintf("threads %d", n))
	cg.Add(t, many.Process.Pid)
	_, err := h.Decide(nil, true)
	must(t, err)
	got := h.realtimes()
	if len(got) != 1 || got[0].Promoted != decide.MaxDeadlines || got[0].Others != maxPromoted-decide.MaxDeadlines || len(h.journal.Entries()) != decide.MaxDeadlines {
		t.Errorf("%+v, and %d in the journal", got, len(h.journal.Entries()))
	}
	must(t, many.Process.Kill())
	many.Wait()
	_, err = h.Decide(nil, true)
	must(t, err)
	if got := h.realtimes(); len(h.journal.Entries()) != 0 || got[0].Promoted+got[0].Others != 0 {
		t.Errorf("once they have ended: %+v, %+v", got, h.journal.Entries())
	}
	if err := h.Apply(t.Context(), target(t, c, "io.realtime: 20ms")); err != nil && !errors.Is(err, feature.ErrPartly) {
		t.Error(err)
	}
}

func subject(s topology.Spec, j *journal.Journal) (feature.Feature, error) {
	return New(Config{Host: feature.Host{Roots: kernel.Default(), Journal: j, Containers: topology.Running(s.Targets)}, Deadline: true})
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	testkit.NeedRoot(t)
	cg := testkit.Cgroup(t)
	if cg.V2 == "" || cg.IO == "" || cg.CPU == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
	}
	id, err := cgroup.ID(cg.V2)
	must(t, err)
	// A thread that sleeps while it becomes SCHED_DEADLINE, and while it ends to be that, costs Linux
	// 6.18 its bandwidth until the domains of the scheduler are made anew.
	cg.Spinner(t)
	c := container.Container{ID: container.ID(id), Name: "task", Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU, IO: cg.IO}}
	due := policy.Settings{Realtime: killedBudget, IOYield: "auto"}
	spec := topology.Spec{Dir: t.TempDir(), Targets: []policy.Target{{Container: c, Settings: due}}}
	faults.Sweep(t, spec.Rig(t, nil),
		faults.Case{Op: "apply 0", Undo: []string{"remove 0"}},
		faults.Case{Op: "remove 0", From: []string{"apply 0", "decide"}},
		faults.Case{Op: "decide", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Later: "decide"},
		faults.Case{Op: "keep", From: []string{"apply 0"}, Undo: []string{"remove 0"}},
		faults.Case{Op: "measure", From: []string{"apply 0"}, Undo: []string{"remove 0"}, Reads: true},
	)
}
