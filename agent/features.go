package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// features constructs the features of this build, in the order in which they
// are shown. It is the only place that names them. One that cannot work here
// is no error: its Support says why. On an error nothing is left open.
func features(cfg Config, set containers, j *journal.Journal) ([]feature.Feature, error) {
	n, err := netcpu.New(netcpu.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, XDP: cfg.XDP})
	if err != nil {
		return nil, fmt.Errorf("make feature: %w", err)
	}
	t, err := traffic.New(traffic.Config{
		Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Slots: slot.New(time.Now),
		Uplinks: cfg.Uplinks, MarkMask: cfg.MarkMask, Delays: cfg.TrafficDelays,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close())
	}
	return []feature.Feature{n, t}, nil
}
