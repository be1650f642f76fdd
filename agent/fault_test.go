package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

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
// its host.
func rounds(arg []byte) (map[string]faults.Op, error) {
	var dirs [2]string
	if err := json.Unmarshal(arg, &dirs); err != nil {
		return nil, err
	}
	h := &host{dir: dirs[1]}
	j, err := journal.Open(dirs[0])
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
	testkit.NeedRoot(t)
	h, dir := newHost(t, 1, 2, 3), t.TempDir()
	knobs := topology.Knobs{Dir: dir}
	faults.Sweep(t, faults.Rig{
		Arg: [2]string{dir, h.dir}, Cheap: true,
		State: func() string {
			state, err := knobs.State()
			testkit.Must(t, err)
			for id := container.ID(1); id <= 3; id++ {
				state += fmt.Sprintf("\n%d %s", id, h.get(t, id))
			}
			return state
		},
		Restore: func() error {
			j, err := journal.Open(dir)
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
