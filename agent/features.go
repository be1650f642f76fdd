package agent

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio"
	"github.com/fairlead-project/fairlead/feature/latency"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/overlay"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// FeatureConfig is the configuration of single features.
type FeatureConfig struct {
	// Uplinks names the devices with bandwidth for traffic to divide, each with its rate in bit/s
	// (0: the driver's); latency measures between them and the containers. Empty: all hardware that
	// is up.
	Uplinks map[string]uint64

	// DiskCapacities is the file of the capacities of disks, measured or given.
	DiskCapacities string

	// Disks are the disks that kubelet is offered reads and writes of, by name.
	Disks policy.Disks

	// XDP names the uplinks where netcpu is to drop packets in the driver, if possible: their
	// operator accepts that most drivers reset their queues for it.
	XDP []string

	// LatencyStamps limits the packets under way that latency keeps; see latency.Config.
	LatencyStamps uint32

	// TrafficDelays makes traffic always measure how long packets wait in its queues, for the
	// metrics page, and not only on request.
	TrafficDelays bool
}

// OverlaysFile is the file in StateDir of the overlay networks that were stopped by hand.
const OverlaysFile = "overlays.json"

// features constructs the features, in display order. Only this function names them. One that
// cannot work here is no error: its Support has the reason. On an error nothing is left open.
// Without who, those that need it are unavailable, and the log has the reason.
func features(cfg Config, set containers, j *journal.Journal, who *identity.Identity, at *hook.Ends) ([]feature.Feature, error) {
	n, err := netcpu.New(netcpu.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Identity: who, Ends: at, XDP: cfg.XDP})
	if err != nil {
		return nil, fmt.Errorf("make feature: %w", err)
	}
	t, err := traffic.New(traffic.Config{
		Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Identity: who, Ends: at,
		Uplinks: cfg.Uplinks, Delays: cfg.TrafficDelays,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close())
	}
	l, err := latency.New(latency.Config{
		Roots: cfg.Roots, Log: cfg.Log, Containers: set, Identity: who, Work: n, Uplinks: slices.Sorted(maps.Keys(cfg.Uplinks)), Stamps: cfg.LatencyStamps,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close(), t.Close())
	}
	b, err := blockio.New(blockio.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Capacities: cfg.DiskCapacities, Disks: cfg.Disks})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close(), t.Close(), l.Close())
	}
	o, err := overlay.New(overlay.Config{
		Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Identity: who, Ends: at, Killed: filepath.Join(cfg.StateDir, OverlaysFile),
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close(), t.Close(), l.Close(), b.Close())
	}
	return []feature.Feature{n, t, l, o, b}, nil
}
