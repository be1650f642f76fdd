package main

import (
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// enforced prints the measures against containers: the limits that their ledgers set, and
// the packets that were dropped.
func (v netcpuView) enforced(w io.Writer) {
	dropped := "DROPPED PPS"
	if v.flags.total {
		dropped = "DROPPED"
	}
	columns := []column{{"ENFORCED", 40}, {"LIMIT %", 0}, {"BALANCE MS", 0}, {dropped, 0}}
	weighed := slices.ContainsFunc(v.n.Accounts, func(a api.NetCPUAccount) bool { return a.IsolationSpared > 0 })
	if weighed { // the mode auto weighs cost and benefit
		columns = append(columns, column{"COSTS IT", 0}, column{"SPARES OTHERS", 0})
	}
	var rows [][]string
	for _, a := range v.n.Accounts {
		limit, balance := "-", "-"
		if l := a.Ledger; l != nil {
			limit, balance = fmt.Sprintf("%.0f", l.Factor*100), fmt.Sprintf("%.0f", math.Round(l.Balance*1000)+0) // no "-0"
		}
		if (limit == "-" || limit == "100") && (balance == "-" || balance == "0") && a.Dropped == 0 && a.IsolationSpared == 0 {
			continue
		}
		row := []string{v.names[a.Container], limit, balance, v.rate(a.Dropped)}
		if weighed {
			row = append(row, v.amount(a.IsolationCost), v.amount(a.IsolationSpared))
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		return
	}
	if v.flags.wide {
		columns[0].max = 0
	}
	right(columns, rows, 1, len(columns)-1)
	fmt.Fprintln(w)
	table(w, columns, rows)
}

// uplinks prints the devices at which packets from outside are dropped.
func (v netcpuView) uplinks(w io.Writer) {
	if len(v.n.Uplinks) == 0 {
		return
	}
	columns := []column{{"UPLINK", 40}, {"DROPS BY", 0}, {"WHY NOT XDP", 0}}
	var rows [][]string
	for _, u := range v.n.Uplinks {
		why := "-"
		if u.Why != "" {
			why = cli.Show(u.Why)
		}
		rows = append(rows, []string{cli.Show(u.Device), cli.Show(u.DropsBy), why})
	}
	if !v.flags.wide {
		columns[2].max = max(leastCut, cli.Across(w, screen)-width(columns[:2], rows))
	}
	fmt.Fprintln(w)
	table(w, columns, rows)
}
