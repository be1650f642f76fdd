package main

import (
	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/bench"
)

func benchTrafficVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "traffic",
		Short: "How containers share an uplink, with fairlead, with tc by hand, with the CNI plugin bandwidth, and with nothing",
	}
	return experiment{bench.TrafficCases, bench.Traffic, bench.TrafficHeadline, bench.TrafficPlots, bench.TrafficBars}.verb(e, cmd, &bench.Options{}, "3, with --quick 1", "2s, with --quick 500ms", func() error { return nil })
}
