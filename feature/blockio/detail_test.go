package blockio

import (
	"os"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/policy"
)

// Details are measured for a moment while a reservation is met, all the time while it is missed and
// its container stalled, and no longer once it is met again. What is shown has the last ones.
func TestDetails(t *testing.T) {
	h := newHost(t)
	l := h.disk(100_000_000)
	db, dbCG := h.container("db")
	_, batchCG := h.container("batch")
	reserve := func(riops string) policy.Target {
		leave := target(t, db, "io.reserve: "+l.Path+" riops="+riops)
		h.apply(leave)
		return leave
	}
	row := func() (of api.BlockIORow) {
		for _, r := range h.report().Rows {
			if r.Container == api.ID(db.ID) && r.Reserved != nil {
				of = r
			}
		}
		return of
	}
	met := reserve("1")
	run(t, dbCG, "disk", "--to", l.Path, "--size", "4096", "--conns", "16")
	h.untilDecided("a glance at what it waits for", met, func(policy.Target) bool {
		return row().State == decide.StateMet && row().Voluntary > 0
	})
	h.untilDecided("the last details in a window without", met, func(policy.Target) bool {
		r := row()
		return !h.window.Detailed && r.State == decide.StateMet && r.Voluntary > 0 && r.DeviceP99 > 0 && r.Achieved.ReadIOPS > 0
	})
	var burners []*os.Process
	for range 3 {
		burners = append(burners, batchCG.Spinner(t))
	}
	missed := reserve("50000000")
	h.untilDecided("details while it is missed", missed, func(policy.Target) bool { return h.meter.Detailed() && row().State == decide.StateContended })
	for _, b := range burners {
		must(t, b.Kill())
	}
	met = reserve("1")
	h.untilDecided("no details while it is met", met, func(policy.Target) bool { return !h.meter.Detailed() && row().State == decide.StateMet })
}
