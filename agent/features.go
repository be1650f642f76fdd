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
	// (0: the driver's). latency measures between them and the containers. Empty: all hardware that
	// is up.
	Uplinks map[string]uint64

	// DiskCapacities is the path of the file with the capacities of disks, measured or configured.
	DiskCapacities string

	// Disks are the disks, by name, whose reads and writes kubelet is offered.
	Disks policy.Disks

	// XDP names the uplinks where netcpu drops packets in the driver, if possible. It is the
	// operator's choice, because most drivers reset their queues when XDP is attached.
	XDP map[string]struct{}

	// TrafficDelays makes traffic measure the delays in its queues all the time, for the metrics
	// page, and not only on request.
	TrafficDelays bool
}

// overlaysFile is the file in StateDir that lists the overlay networks stopped by hand.
const overlaysFile = "overlays.json"

// The features that make root qdiscs and IFBs, and threads that poll.
const shaper, poller = "traffic", "netcpu"

// features constructs the features, in display order. Only this file names them. A feature that
// cannot work here is no error: its Support has the reason. On an error nothing stays open. Without
// who, the features that need it are unavailable.
func features(cfg Config, set containers, j *journal.Journal, who *identity.Identity, at *hook.Ends) (made []feature.Feature, err error) {
	h := feature.Host{Roots: cfg.Roots, Journal: j, Log: cfg.Log, Containers: set, Identity: who, Ends: at}
	n, err := netcpu.New(netcpu.Config{Host: h, XDP: slices.Sorted(maps.Keys(cfg.XDP))})
	if err != nil {
		return nil, fmt.Errorf("make feature: %w", err)
	}
	made = append(made, n)
	for _, next := range []func() (feature.Feature, error){
		func() (feature.Feature, error) {
			return traffic.New(traffic.Config{Host: h, Uplinks: cfg.Uplinks, Delays: cfg.TrafficDelays})
		},
		func() (feature.Feature, error) {
			return latency.New(latency.Config{Host: h, Work: n, Uplinks: slices.Sorted(maps.Keys(cfg.Uplinks))})
		},
		func() (feature.Feature, error) {
			return overlay.New(overlay.Config{Host: h, Killed: filepath.Join(cfg.StateDir, overlaysFile)})
		},
		func() (feature.Feature, error) {
			return blockio.New(blockio.Config{Host: h, Capacities: cfg.DiskCapacities, Disks: cfg.Disks})
		},
	} {
		f, err := next()
		if err != nil {
			errs := []error{fmt.Errorf("make feature: %w", err)}
			for _, f := range made {
				errs = append(errs, f.Close())
			}
			return nil, errors.Join(errs...)
		}
		made = append(made, f)
	}
	return made, nil
}
