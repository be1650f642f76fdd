package main

import (
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/fairlead/blockio"
	"github.com/fairlead-project/fairlead/cmd/fairlead/latency"
	"github.com/fairlead-project/fairlead/cmd/fairlead/netcpu"
	"github.com/fairlead-project/fairlead/cmd/fairlead/overlay"
	"github.com/fairlead-project/fairlead/cmd/fairlead/traffic"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
)

// feature lists the parts of the program that belong to one feature.
type feature struct {
	verbs []verb.Verb
	flags func(*pflag.FlagSet, *agent.FeatureConfig) // adds flags to the agent; nil: none
}

// features lists the features. A new one adds a line here.
func features() []feature {
	return []feature{
		{netcpu.Verbs(), netcpu.Flags},
		{traffic.Verbs(), traffic.Flags},
		{latency.Verbs(), nil},
		{blockio.Verbs(), blockio.Flags},
		{overlay.Verbs(), nil},
	}
}
