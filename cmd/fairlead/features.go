package main

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
)

// featureParts are what the program has for one feature, in files of its own.
type featureParts struct {
	verb  func(env) *cobra.Command                   // shows its report
	bench func(env) *cobra.Command                   // measures what it does; nil: nothing does
	flags func(*pflag.FlagSet, *agent.FeatureConfig) // of the agent; nil: none
}

// features lists the parts of each feature. A new one is a line here.
func features() []featureParts {
	return []featureParts{
		{netcpuVerb, benchNetCPUVerb, netcpuAgentFlags},
		{trafficVerb, benchTrafficVerb, trafficAgentFlags},
		{latencyVerb, benchLatencyVerb, nil},
		{blockioVerb, benchBlockIOVerb, blockioAgentFlags},
	}
}
