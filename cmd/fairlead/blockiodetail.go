package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// blockioDetail prints how the watched containers competed for CPUs, and what interrupted
// the CPUs.
func blockioDetail(w io.Writer, b api.BlockIO) {
	var rows [][]string
	seen := make(map[string]bool)
	for _, r := range b.Rows {
		if r.Container == 0 || seen[r.Container.String()] || r.Voluntary+r.Involuntary == 0 && r.CPUPressure == 0 {
			continue
		}
		seen[r.Container.String()] = true // its rows for other disks are the same
		rows = append(rows, []string{
			cli.Show(r.Name), scale(float64(r.Voluntary)), scale(float64(r.Involuntary)), two(r.ICPU), two(r.ICPUForeign), two(r.ICPUOwn),
			quantile(r.WaitForeign), percent(r.CPUPressure), percent(r.IOPressure), quantile(r.Throttled),
		})
	}
	if len(rows) > 0 {
		fmt.Fprintln(w)
		table(w, []column{
			{"CONTAINER", 24}, {"VOLUNTARY", 0}, {"INVOLUNTARY", 0}, {"I_CPU", 0}, {"OF OTHERS", 0}, {"OF ITSELF", 0},
			{"WAITED FOR OTHERS", 0}, {"CPU PRESSURE", 0}, {"IO PRESSURE", 0}, {"THROTTLED", 0},
		}, rows)
	}
	if rows = nil; len(b.Waits) > 0 {
		names := make(map[string]string)
		for _, r := range b.Rows {
			names[r.Container.String()] = r.Name
		}
		for _, x := range b.Waits {
			rows = append(rows, []string{cli.Show(names[x.Victim.String()]), cli.Show(x.Name), brief(x.Share)})
		}
		fmt.Fprintln(w)
		table(w, []column{{"WAITED", 24}, {"WHILE THERE RAN", 24}, {"IN EACH SECOND", 0}}, rows)
	}
	if rows = nil; len(b.Threads) > 0 {
		for _, t := range b.Threads {
			rows = append(rows, []string{strconv.Itoa(t.TID), strconv.FormatUint(t.Voluntary, 10), strconv.FormatUint(t.Involuntary, 10)})
		}
		fmt.Fprintln(w)
		table(w, []column{{"THREAD", 0}, {"VOLUNTARY", 0}, {"INVOLUNTARY", 0}}, rows)
	}
	if rows = nil; len(b.Interrupts) > 0 {
		for _, i := range b.Interrupts {
			kind := "softirq"
			if !i.Soft {
				kind = "interrupt"
				if i.Number > 0 {
					kind += " " + strconv.Itoa(i.Number)
				}
			}
			var each []string
			for _, n := range i.CPUs {
				each = append(each, scale(n))
			}
			rows = append(rows, []string{cli.Show(i.Source), kind, strings.Join(each, " ")})
		}
		fmt.Fprintln(w)
		table(w, []column{{"SOURCE", 0}, {"KIND", 0}, {"PER SECOND, BY CPU", 0}}, rows)
	}
	if b.Stolen > 0.005 {
		fmt.Fprintf(w, "\nThe hypervisor let CPUs wait for %s in each second.\n", brief(b.Stolen))
	}
}

func two(n float64) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatFloat(n, 'f', 2, 64)
}

func percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }
