package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// rounds makes an agent make rounds, while containers come and go. dirs are those of its state and
// its host; with a third one see serving.
func rounds(arg []byte) (map[string]faults.Op, error) {
	var dirs [3]string
	if err := json.Unmarshal(arg, &dirs); err != nil {
		return nil, err
	}
	h := &host{dir: dirs[1]}
	if dirs[2] != "" {
		return serving(dirs[0], h, &host{dir: dirs[2]}), nil
	}
	j, err := journal.Open(dirs[0], "")
	if err != nil {
		return nil, err
	}
	set, p := newFakeSet(true), ordinary()
	p.first, p.longest = 1, 1
	a := assemble(Config{StateDir: dirs[0], Log: quiet()}, set, policy.NewStore("", time.Now), j, h.opener, []feature.Feature{turner{newFake(), h, j}}, p)
	round := func(list ...container.Container) faults.Op {
		return func(ctx context.Context) error {
			set.set(true, list...)
			set.snap.Known = &discover.Known{} // another one is written to disk
			for range 2 {                      // the second sees what the workers have done
				a.round()
				for did := true; did && ctx.Err() == nil; {
					did, _ = a.workers[0].step(ctx)
				}
			}
			errs := []error{ctx.Err()}
			for _, r := range a.workers[0].rows {
				errs = append(errs, r.err)
			}
			return errors.Join(errs...)
		}
	}
	return map[string]faults.Op{
		"come": round(box(1, policy.NetCPUIsolate), box(2, policy.NetCPUObserve), box(3, policy.NetCPUIsolate)),
		"stay": round(box(3, policy.NetCPUIsolate)),
		"go":   round(),
	}, nil
}

// Each call to the kernel fails once.
func TestFaults(t *testing.T) {
	testkit.Later(t)
	testkit.NeedRoot(t)
	t.Parallel()
	h, dir := newHost(t, 1, 2, 3), t.TempDir()
	knobs := topology.Knobs{Dir: dir}
	faults.Sweep(t, faults.Rig{
		Arg: [3]string{dir, h.dir}, Cheap: true,
		State: func() string {
			state, err := knobs.State()
			testkit.Must(t, err)
			for id := container.ID(1); id <= 3; id++ {
				state += fmt.Sprintf("\n%d %s", id, h.get(t, id))
			}
			return state
		},
		Restore: func() error {
			j, err := journal.Open(dir, "")
			if err != nil {
				return err
			}
			_, err = j.Restore(h.open, nil)
			return errors.Join(err, j.Close())
		},
	},
		faults.Case{Op: "come", Undo: []string{"go"}},
		faults.Case{Op: "stay", From: []string{"come"}, Undo: []string{"go"}},
		faults.Case{Op: "go", From: []string{"come"}},
	)
}

// serving runs an agent with two features, each with a host of its own, for two containers.
func serving(dir string, hosts ...*host) map[string]faults.Op {
	var a *Agent
	set := newFakeSet(true, box(1, policy.NetCPUIsolate), box(2, policy.NetCPUIsolate))
	states := func() (list []api.FeatureStatus) {
		for _, c := range set.Running() {
			list = append(list, a.statuses(a.target(c))...)
		}
		return list
	}
	// run runs the agent until ok, or until the agent ends.
	run := func(ok func() bool) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		ended := make(chan error)
		go func() { defer close(ended); a.Run(ctx) }()
		for !ok() {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
		cancel()
		<-ended
	}
	return map[string]faults.Op{
		"open": func(context.Context) error {
			j, err := journal.Open(dir, "")
			if err != nil {
				return err
			}
			j.SetPatience(50 * time.Millisecond)
			p := ordinary()
			p.call, p.stop = 50*time.Millisecond, 300*time.Millisecond
			var list []feature.Feature
			for i, h := range hosts {
				f := newFake()
				f.name = []string{"netcpu", "blockio"}[i]
				list = append(list, turner{f, h, j})
			}
			a = assemble(Config{StateDir: dir, Log: quiet()}, set, policy.NewStore("", time.Now), j, hosts[0].opener, list, p)
			return nil
		},
		// The context ends when a call hangs. Then the status tells what is not done, the other
		// feature goes on, and the agent stops. In a start, there is no status yet.
		"start": func(hangs context.Context) error {
			run(func() bool {
				return hangs.Err() != nil || !slices.ContainsFunc(states(), func(s api.FeatureStatus) bool { return s.State != api.StateDone })
			})
			return nil
		},
		"serve": func(hangs context.Context) error {
			var errs []error
			run(func() bool {
				finished := make(map[string]int)
				told, most := 0, 0
				errs = nil
				for _, s := range states() {
					if s.State == api.StateDone {
						finished[s.Feature]++
						most = max(most, finished[s.Feature])
					} else {
						errs = append(errs, errors.New(s.Feature))
					}
					if s.State == api.StateDone || hangs.Err() != nil && s.Error != "" {
						told++
					}
				}
				return told >= 4 && most >= 2
			})
			return errors.Join(errs...)
		},
	}
}

// A call of each kind of a running agent hangs. What hangs on a feature's host, the status tells of that
// feature; the other does its work. The agent stops, wherever a call hangs.
func TestHangs(t *testing.T) {
	testkit.Later(t)
	testkit.NeedRoot(t)
	t.Parallel()
	first, other, dir := newHost(t, 1, 2), newHost(t, 1, 2), t.TempDir()
	s := faults.Start(t, [3]string{dir, first.dir, other.dir})
	do := func(op string, f faults.Fault) (out faults.Outcome) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // what has hung may still hold the journal
			if out = s.Do("open", faults.Fault{}); out.Err == "" && out.Died == "" {
				break
			}
			if out.Died != "" || time.Now().After(end) {
				t.Fatal(out)
			}
		}
		if out = s.Do(op, f); out.Died != "" {
			t.Fatalf("%s, %s at %v: %s", op, f, f.At, out.Died)
		}
		return out
	}
	tried := make(map[string]bool)
	for _, call := range do("serve", faults.Fault{}).Calls {
		if tried[call.At.Kind] {
			continue
		}
		tried[call.At.Kind] = true
		of := func(name string) string {
			for feature, h := range map[string]*host{"netcpu": first, "blockio": other} {
				if strings.Contains(name, h.dir) {
					return feature
				}
			}
			return ""
		}
		op := "serve"
		if of(call.Name) == "" {
			op = "start"
		}
		out := do(op, faults.Fault{At: call.At, Hang: true})
		if out.Met != nil && strings.Trim(strings.ReplaceAll(out.Err, of(out.Met.Name), ""), "\n") != "" {
			t.Errorf("%s hangs: the status tells of %q", out.Met.Name, out.Err)
		}
	}
	t.Logf("%d kinds of calls", len(tried))
	for end := time.Now().Add(time.Minute); ; {
		out := do("serve", faults.Fault{})
		now := first.get(t, 1) + first.get(t, 2) + other.get(t, 1) + other.get(t, 2)
		if out.Err == "" && now == "plainplainplainplain" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("afterwards: %q, %s", out.Err, now)
		}
	}
}
