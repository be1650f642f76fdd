package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/datapath/ends"
	"github.com/fairlead-project/fairlead/datapath/identity"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio"
	"github.com/fairlead-project/fairlead/feature/latency"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// FeatureConfig is the configuration of single features.
type FeatureConfig struct {
	// Uplinks names the devices whose bandwidth traffic divides, each with its rate in
	// bit/s (0: what the device says), and between which and the containers latency
	// measures; empty: all hardware that is up.
	Uplinks map[string]uint64

	// LinkRates is the file of the rates of uplinks that CalibrateLink measured.
	LinkRates string

	// DiskCapacities is the file of what disks can do, as measured or given.
	DiskCapacities string

	// XDP names the uplinks at which netcpu drops packets in the driver, where
	// possible: their operator accepts that most drivers reset their queues for
	// it.
	XDP []string

	// TrafficDelays makes traffic always measure how long packets wait in its
	// queues, for the metrics page, and not only while somebody asks.
	TrafficDelays bool
}

// features constructs the features of this build, in the order in which they
// are shown. It is the only place that names them. One that cannot work here
// is no error: its Support says why. On an error nothing is left open. Without who
// each finds out for itself why there is none.
func features(cfg Config, set containers, j *journal.Journal, who *identity.Identity) ([]feature.Feature, error) {
	at := ends.Open(cfg.Roots.Proc, j)
	n, err := netcpu.New(netcpu.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Identity: who, Ends: at, XDP: cfg.XDP})
	if err != nil {
		return nil, fmt.Errorf("make feature: %w", err)
	}
	t, err := traffic.New(traffic.Config{
		Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Identity: who, Ends: at,
		Uplinks: cfg.Uplinks, Measured: cfg.LinkRates, MarkMask: cfg.MarkMask, Delays: cfg.TrafficDelays,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close())
	}
	l, err := latency.New(latency.Config{
		Roots: cfg.Roots, Log: cfg.Log, Containers: set, Identity: who, Work: n, Uplinks: slices.Sorted(maps.Keys(cfg.Uplinks)),
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close(), t.Close())
	}
	b, err := blockio.New(blockio.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Capacities: cfg.DiskCapacities})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close(), t.Close(), l.Close())
	}
	return []feature.Feature{n, t, l, b}, nil
}

// CalibrateLink measures the rate of the uplink that leads to an address, in bit/s, and
// notes it in cfg.LinkRates; see traffic.Calibrate.
func CalibrateLink(ctx context.Context, cfg Config, to string, over time.Duration) (device string, rate uint64, err error) {
	device, c, err := traffic.Calibrate(ctx, traffic.Config{
		Roots: cfg.Roots, Uplinks: cfg.Uplinks, Measured: cfg.LinkRates,
	}, to, over)
	return device, c.Rate, err
}
