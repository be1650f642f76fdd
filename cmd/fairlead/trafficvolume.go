package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
)

func trafficVolumeVerb(e cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "volume [CONTAINER|ACCOUNT]",
		Aliases:    []string{"volumes"},
		SuggestFor: []string{"usage", "quota"},
		Short:      "Show how much containers have sent and received, by day and month",
		Long: `Show how much each container has sent and received under its name, today, this
month and in total, over all its restarts and those of the agent and the host; and
how much of its volume (net.volume) is used. With a CONTAINER, which need not run
any more, or with an ACCOUNT as in the list, show its days and months.`,
		Example: `  fairlead traffic volume
  fairlead traffic volume web-1
  fairlead traffic volume pod/shop/web-0 -o json`,
		Args: cli.NArgs(0, 1, "one CONTAINER or ACCOUNT"),
	}
	out := cli.FormatFlag(cmd)
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		of := ""
		if len(args) > 0 {
			if of = args[0]; of == "" {
				return cli.Usagef(`CONTAINER is ""`)
			}
		}
		v, err := c.Volumes(cmd.Context(), of)
		if err != nil {
			return err
		}
		return out.Print(e.Stdout, v, func(w io.Writer) {
			volumeTable(w, v)
			for _, a := range v.Accounts {
				volumeHistory(w, "MONTH", a.Months)
				volumeHistory(w, "DAY", a.Days)
			}
		})
	})
}

// volumeTable prints a row for each account.
func volumeTable(w io.Writer, v api.Volumes) {
	if len(v.Accounts) == 0 {
		fmt.Fprintln(w, "Nothing has been counted yet.")
		return
	}
	columns := []column{{"ACCOUNT", 40}, {"RUNS", 0}, {"TODAY", 0}, {"MONTH SENT", 0}, {"RECEIVED", 0}, {"TOTAL", 0}, {"VOLUME", 0}, {"USED", 0}}
	var rows [][]string
	for _, a := range v.Accounts {
		runs := "no"
		if a.Container != 0 {
			runs = "yes"
		}
		volume, used := volumeLimits(a.Limits)
		rows = append(rows, []string{
			cli.ShowText(a.Account), runs, size(a.Day.Sent + a.Day.Received), size(a.Month.Sent), size(a.Month.Received), size(a.Total.Sent + a.Total.Received), volume, used,
		})
	}
	right(columns, rows, 2, 5)
	table(w, columns, rows)
	fmt.Fprintf(w, "\nDays and months in %s, as of %s\n", cli.Show(v.Zone), v.Taken.Format("2006-01-02 15:04:05 MST"))
}

// volumeLimits formats the volumes of policy, each once.
func volumeLimits(limits []api.VolumeLimit) (volume, used string) {
	var volumes, parts []string
	seen := make(map[string]bool)
	for _, l := range limits {
		text := l.Volume
		if l.After > 0 {
			text += ", then " + policy.FormatRate(l.After)
		}
		if seen[text] {
			continue
		}
		seen[text] = true
		volumes = append(volumes, text)
		parts = append(parts, fmt.Sprintf("%.1f %%", 100*float64(l.Used)/float64(l.Bytes)))
	}
	if len(volumes) == 0 {
		return "-", "-"
	}
	return strings.Join(volumes, "; "), strings.Join(parts, "; ")
}

// volumeHistory prints the days or months of one account.
func volumeHistory(w io.Writer, of string, periods []api.VolumePeriod) {
	if len(periods) == 0 {
		return
	}
	columns := []column{{of, 0}, {"SENT", 0}, {"RECEIVED", 0}, {"BOTH", 0}}
	var rows [][]string
	for _, p := range periods {
		rows = append(rows, []string{cli.ShowText(p.Period), size(p.Sent), size(p.Received), size(p.Sent + p.Received)})
	}
	right(columns, rows, 1, 3)
	fmt.Fprintln(w)
	table(w, columns, rows)
}

// size formats bytes with three digits and a decimal prefix: "148MB".
func size(n uint64) string { return scale(float64(n)) + "B" }
