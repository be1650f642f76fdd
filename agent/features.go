package agent

import (
	"fmt"

	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

// features constructs the features of this build, in the order in which they
// are shown. It is the only place that names them. One that cannot work here
// is no error: its Support says why. On an error nothing is left open.
func features(cfg Config, j *journal.Journal) ([]feature.Feature, error) {
	n, err := netcpu.New(netcpu.Config{Roots: cfg.Roots, Journal: j, Log: cfg.Log})
	if err != nil {
		return nil, fmt.Errorf("make feature: %w", err)
	}
	return []feature.Feature{n}, nil
}

// featureOf gives the feature that puts a policy key into force, built or not.
func featureOf(key string) string {
	for _, k := range policy.Schema() {
		if "fairlead."+k.Name == key {
			return k.Feature
		}
	}
	return ""
}
