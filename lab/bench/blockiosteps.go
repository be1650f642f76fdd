package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/irq"
)

// blockioArm is an arm that settings make: all neighbours run from its start.
type blockioArm struct {
	arm        arm
	reserve    float64           // as a fraction of the undisturbed throughput; 0: nothing
	own        map[string]string // settings of the container with the load
	neighbours map[string]string // settings of all others
	settle     time.Duration     // from the start of the neighbours to the window
}

// actionSteps take each action against all burners from the start.
func actionSteps() []blockioArm {
	steps := []blockioArm{{arm: armOff, settle: blockioSettle}}
	for _, action := range []string{"idle", "quota"} {
		steps = append(steps, blockioArm{arm: arm(action), neighbours: map[string]string{"fairlead.io.yield": action}, settle: blockioSettle})
	}
	return steps
}

// budgetSteps are figure 6: no budget for real-time, and growing budgets.
func budgetSteps() []blockioArm {
	steps := []blockioArm{{arm: armOff, settle: blockioSettle}}
	for _, budget := range []string{"20ms", "50ms", "100ms", "200ms", "400ms"} {
		steps = append(steps, blockioArm{arm: arm(budget), own: map[string]string{"fairlead.io.realtime": budget}, settle: blockioSettle})
	}
	return steps
}

// dueOfMail is the reservation of the mail server, as a fraction of its undisturbed throughput. It
// is more than in MIST's figure 9 (3000 of 4000 to 6000), because the neighbours here leave the
// mail server three quarters of its throughput, and MIST's left it less than 3000.
const dueOfMail = 0.85

// streamSteps are figure 9: a mail server beside containers that decode and send streams, without
// protection, with each step of it alone, and with all steps.
func streamSteps() []blockioArm {
	return []blockioArm{
		{armOff, 0, nil, nil, blockioSettle},
		{"CPU alone", 0, nil, map[string]string{"fairlead.io.yield": "idle"}, blockioSettle},
		{"interrupts alone", dueOfMail, map[string]string{"fairlead.io.interrupts": "apart"}, nil, blockioSettle},
		{armOn, dueOfMail, map[string]string{"fairlead.io.interrupts": "auto"}, map[string]string{"fairlead.io.yield": "auto"}, 5 * time.Second},
	}
}

// step measures the load alone, or beside all neighbours with the settings of an arm.
func (r *blockioRig) step(ctx context.Context, c blockioCase, a arm) (figures []figure, err error) {
	streams := c.rig.streams > 0
	switch {
	case a == armAlone && streams:
		if r.alone, r.due, err = r.undisturbed(ctx, 2*r.take); err != nil {
			return nil, err
		}
		if _, r.calm, err = r.slowed(ctx, r.take); err != nil {
			return nil, err
		}
		r.serving, err = r.diskCPUs()
		return nil, err
	case a == armAlone:
		if r.alone, err = r.window(ctx, r.take); err != nil {
			return nil, err
		}
		return nil, r.awake(ctx)
	}
	step := c.steps[slices.IndexFunc(c.steps, func(s blockioArm) bool { return s.arm == a })]
	if step.reserve > 0 {
		part := func(n uint64) uint64 { return uint64(step.reserve * float64(n)) }
		// The kernel merges several blocks into one request, and the reservation counts requests.
		end, err := r.reserve(ctx, blockioName, api.BlockIOFigures{ReadIOPS: part(r.due.ReadIOPS), WriteIOPS: part(r.due.WriteIOPS)})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, end()) }()
	}
	for _, name := range append([]string{blockioName}, r.names...) {
		settings := step.neighbours
		if name == blockioName {
			settings = step.own
		}
		if len(settings) == 0 {
			continue
		}
		if _, err := r.client.Set(ctx, name, api.SetRequest{Set: settings}); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		defer r.client.Set(context.WithoutCancel(ctx), name, api.SetRequest{Unset: slices.Collect(maps.Keys(settings))})
	}
	w, err := r.disturbed(ctx, step.settle)
	if err != nil || !streams {
		return r.kept(w), err
	}
	return append(w.slowed,
		figure{PartOfDue, "1", w.Rate() / (dueOfMail * r.alone.Rate())}, r.longer(w),
		figure{NetworkTime, "1", w.network.Seconds() / r.take.Seconds()},
	), nil
}

// diskCPUs lists the CPUs that handle the disk's most frequent interrupt.
func (r *blockioRig) diskCPUs() (cpus []int, err error) {
	roots := kernel.Default()
	irqs, err := irq.Of(roots.Sys, filepath.Join(roots.Sys, "block", filepath.Base(r.device)))
	if err != nil || len(irqs) == 0 {
		return nil, err
	}
	return irq.CPUs(roots.Proc, slices.MaxFunc(irqs, func(a, b int) int {
		return cmp.Compare(irq.Count(roots.Sys, a), irq.Count(roots.Sys, b))
	}))
}
