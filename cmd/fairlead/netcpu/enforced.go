package netcpu

import (
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
)

// enforced prints the measures against containers: the limits that their ledgers set, and
// the packets that were dropped.
func (v netcpuView) enforced(w io.Writer) {
	dropped := "DROPPED PPS"
	if v.flags.Total {
		dropped = "DROPPED"
	}
	limit := func(a api.NetCPUAccount) string {
		if a.Ledger == nil {
			return ""
		}
		return fmt.Sprintf("%.0f", a.Ledger.Factor*100)
	}
	balance := func(a api.NetCPUAccount) string {
		if a.Ledger == nil {
			return ""
		}
		return fmt.Sprintf("%.0f", math.Round(a.Ledger.Balance*1000)+0) // no "-0"
	}
	limited := slices.DeleteFunc(slices.Clone(v.n.Accounts), func(a api.NetCPUAccount) bool {
		free := slices.Contains([]string{"", "100"}, limit(a)) && slices.Contains([]string{"", "0"}, balance(a))
		return free && a.Dropped == 0
	})
	columns.Below(v.line(w), limited,
		columns.Plain("ENFORCED", v.name).Cut(40),
		columns.Number("LIMIT %", limit),
		columns.Number("BALANCE MS", balance),
		columns.Number(dropped, func(a api.NetCPUAccount) string { return v.rate(a.Dropped) }),
	)
}

// uplinks prints the devices at which packets from outside are dropped.
func (v netcpuView) uplinks(w io.Writer) {
	columns.Below(v.line(w), v.n.Uplinks,
		columns.Text("UPLINK", func(u api.NetCPUUplink) string { return u.Device }).Cut(40),
		columns.Text("DROPS BY", func(u api.NetCPUUplink) string { return u.DropsBy }),
		columns.Text("WHY NOT XDP", func(u api.NetCPUUplink) string { return u.Why }).Rest(screen),
	)
}
