package main

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// featureParts are the parts of the program for one feature, in files of their own.
type featureParts struct {
	verb  func(cli.Env) *cobra.Command               // shows the report of the feature; nil: none
	flags func(*pflag.FlagSet, *agent.FeatureConfig) // adds flags to the agent; nil: none
}

// features lists the parts of each feature. A new feature adds a line here.
func features() []featureParts {
	return []featureParts{
		{netcpuVerb, netcpuAgentFlags},
		{trafficVerb, trafficAgentFlags},
		{latencyVerb, nil},
		{blockioVerb, blockioAgentFlags},
		{overlayVerb, nil},
	}
}
