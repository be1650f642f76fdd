package main

import (
	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/lab/bench"
)

func benchOverlayVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "overlay",
		Short: "Measure containers of two hosts that talk over an overlay network",
	}
	return experiment{bench.OverlayCases, bench.Overlay, bench.OverlayHeadline, bench.OverlayPlots, bench.OverlayBars}.verb(e, cmd, &bench.Options{}, "3, with --quick 2", "1.5s, with --quick 1s", func() error { return nil })
}
