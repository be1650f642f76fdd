package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/lab/bench"
)

func demoVerb(e env) *cobra.Command {
	var page string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show in a minute what a neighbour's packets cost, without and with fairlead",
		Long: `Show in a minute what a neighbour's packets cost, without and with fairlead.
The demo builds two sandboxes with a network of their own, floods one of them,
and removes everything at the end, also on Ctrl-C. It needs root and two CPUs.`,
		Args: nargs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			screen := bench.Screen{Writer: e.stdout, Colour: terminal(e.stdout) && e.getenv("NO_COLOR") == ""}
			return withPage(cmd.Context(), page, func(ctx context.Context, html io.Writer) error {
				r, err := bench.Demo(ctx, screen, version)
				if err != nil || html == nil {
					return err
				}
				return r.WriteHTML(html, "fairlead demo", bench.DemoHeadline(r), bench.DemoPlots())
			})
		},
	}
	cmd.Flags().StringVar(&page, "html", "", "also write a page with plots to this file")
	return cmd
}
