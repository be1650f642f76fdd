package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container/slot"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// features constructs the features of this build, in the order in which they
// are shown. It is the only place that names them. One that cannot work here
// is no error: its Support says why. On an error nothing is left open.
func features(cfg Config, j *journal.Journal) ([]feature.Feature, error) {
	n, err := netcpu.New(netcpu.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log, XDP: cfg.XDP})
	if err != nil {
		return nil, fmt.Errorf("make feature: %w", err)
	}
	t, err := traffic.New(traffic.Config{
		Roots: cfg.Roots, Journal: j, Log: cfg.Log, Slots: slot.New(time.Now),
		Uplinks: cfg.Uplinks, MarkMask: cfg.MarkMask, Delays: cfg.TrafficDelays,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make feature: %w", err), n.Close())
	}
	return []feature.Feature{n, t}, nil
}

// accountsOf gives the accounts that one of the features keeps, nil if none does.
func accountsOf(fs []feature.Feature, now time.Time) *accounts {
	for _, f := range fs {
		if m, ok := f.(*netcpu.Netcpu); ok {
			return &accounts{meter: m, since: now}
		}
	}
	return nil
}

// uplinksOf says where a feature drops packets before they are queued.
func uplinksOf(f feature.Feature) (list []api.NetCPUUplink) {
	n, ok := f.(*netcpu.Netcpu)
	if !ok {
		return nil
	}
	for _, d := range n.Doors() {
		list = append(list, api.NetCPUUplink{Device: d.Device, NetNS: d.Netns, DropsBy: d.By, Why: d.Why})
	}
	return list
}

// shaperOf gives the feature that divides the uplinks, nil if none does.
func shaperOf(fs []feature.Feature) shaper {
	for _, f := range fs {
		if t, ok := f.(*traffic.Traffic); ok {
			return t
		}
	}
	return nil
}

// noAccounts says whether a meter's error is that this host can have none.
func noAccounts(err error) bool { return errors.Is(err, netcpu.ErrNoAccounts) }

// featureOf gives the feature that puts a policy key into force, built or not.
func featureOf(key string) string {
	for _, k := range policy.Schema() {
		if "fairlead."+k.Name == key {
			return k.Feature
		}
	}
	return ""
}
