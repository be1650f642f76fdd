package netcpu

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
)

// screen is the maximum width of a table if no terminal reports one.
const screen = 100

// netcpuView is a reading and the options for its display.
type netcpuView struct {
	n     api.NetCPU
	flags netcpuFlags
	span  float64 // length of the reading in seconds
	names map[api.ID]string
}

func newNetcpuView(n api.NetCPU, f netcpuFlags) netcpuView {
	v := netcpuView{n: n, flags: f, span: n.Taken.Sub(n.Since).Seconds(), names: make(map[api.ID]string)}
	known := make(map[api.ID]string)
	for _, a := range n.Accounts {
		known[a.Container] = a.Name
	}
	for _, t := range n.Matrix {
		known[t.Victim], known[t.Culprit] = cmp.Or(known[t.Victim], t.VictimName), cmp.Or(known[t.Culprit], t.CulpritName)
	}
	same := make(map[string]int)
	for _, name := range known {
		same[name]++
	}
	for id, name := range known {
		switch {
		case name == "":
			name = "(ended, id " + id.String() + ")"
		case same[name] > 1:
			name = cli.Show(name) + " " + id.String()
		case strings.HasPrefix(name, "("):
			name = fmt.Sprintf("%q", name) // only our own names are in brackets
		default:
			name = cli.Show(name)
		}
		v.names[id] = name
	}
	v.names[0] = "(system)"
	return v
}

// amount formats a time in the unit of the table: percent of one CPU, or seconds.
func (v netcpuView) amount(sec float64) string {
	switch {
	case !v.flags.Total && v.span <= 0:
		return "0.0"
	case !v.flags.Total:
		return fmt.Sprintf("%.1f", sec/v.span*100)
	case sec < 1000:
		return fmt.Sprintf("%.2f", sec)
	}
	return fmt.Sprintf("%.0f", sec)
}

// visible reports whether amount shows more than zeros.
func (v netcpuView) visible(sec float64) bool { return strings.Trim(v.amount(sec), "0.") != "" }

// unit describes the unit of a table.
func (v netcpuView) unit() string {
	if v.flags.Total {
		return fmt.Sprintf("CPU seconds since %s (%s)", v.n.Since.Local().Format(time.DateTime), v.over())
	}
	return "Percent of one CPU, over " + v.over()
}

func (v netcpuView) over() string { return columns.Span(v.n.Taken.Sub(v.n.Since)) }

// line returns w, with lines of any width for --wide.
func (v netcpuView) line(w io.Writer) io.Writer { return cli.Wide(w, v.flags.wide) }

func (v netcpuView) name(a api.NetCPUAccount) string { return v.names[a.Container] }

func (v netcpuView) tasks(a api.NetCPUAccount) string {
	return columns.If(a.Tasks != 0, v.amount(a.Tasks))
}

// packets returns the head of a column of rate.
func (v netcpuView) packets() string {
	if v.flags.Total {
		return "PACKETS"
	}
	return "PPS"
}

func (v netcpuView) of() string {
	if v.flags.Total {
		return " s"
	}
	return " %"
}

// print prints the view that the flags select; detail is for one container.
func (v netcpuView) print(w io.Writer, detail bool) {
	switch {
	case v.flags.matrix:
		v.matrix(w)
	case detail && len(v.n.Accounts) == 1:
		v.detail(w, v.n.Accounts[0])
	default:
		v.summary(w)
	}
}

// summary prints one line for each container with anything to show.
func (v netcpuView) summary(w io.Writer) {
	if len(v.n.Accounts) == 0 && v.n.System.Network() == 0 {
		fmt.Fprintf(w, "No container runs here, and no packet was handled in %s.\n", v.over())
		return
	}
	var busy []api.NetCPUAccount
	quiet := 0
	for _, a := range append(slices.Clone(v.n.Accounts), v.n.System) {
		if slices.ContainsFunc([]float64{a.Tasks, a.Network(), a.Stolen, a.Taken, a.Throttled}, v.visible) {
			busy = append(busy, a)
		} else if a.Container != 0 {
			quiet++
		}
	}
	if len(busy) == 0 {
		fmt.Fprintf(w, "No container did anything, and no packet was handled for one, in %s.\n", v.over())
		v.uplinks(w)
		return
	}
	fmt.Fprintln(w, v.unit())
	columns.Print(v.line(w), busy,
		columns.Plain("CONTAINER", v.name).Cut(20),
		columns.Number("TASKS", v.tasks),
		columns.Number("RECV", func(a api.NetCPUAccount) string { return v.amount(a.Receive) }),
		columns.Number("SEND", func(a api.NetCPUAccount) string { return v.amount(a.Send) }),
		columns.Number("STOLEN", func(a api.NetCPUAccount) string { return columns.If(a.Container != 0, v.amount(a.Stolen)) }),
		columns.Number("TOOK", func(a api.NetCPUAccount) string { return v.amount(a.Taken) }),
		columns.Number(v.packets(), func(a api.NetCPUAccount) string { return v.rate(a.Packets()) }),
		columns.Number("NS/PKT", func(a api.NetCPUAccount) string { // the system also uses time for other work than packets
			return columns.If(a.Container != 0, each(a.Network()*1e9, a.Packets()))
		}),
		columns.Plain("HELD BACK BY", v.heldBack).Rest(screen),
	)
	fmt.Fprintln(w)
	switch quiet {
	case 0:
	case 1:
		fmt.Fprintln(w, "1 more container did nothing, and nothing was done for it.")
	default:
		fmt.Fprintf(w, "%d more containers did nothing, and nothing was done for them.\n", quiet)
	}
	v.check(w)
	v.enforced(w)
	v.uplinks(w)
}

// heldBack lists the culprits that delayed a container, and for how long.
func (v netcpuView) heldBack(a api.NetCPUAccount) string {
	var who []string
	if v.visible(a.Throttled) {
		who = append(who, "own quota "+v.amount(a.Throttled))
	} else if a.Periods > 0 {
		who = append(who, "own quota")
	}
	for _, c := range a.StolenBy {
		if v.visible(c.Seconds) {
			who = append(who, cli.Cut(v.names[c.Container], 20)+" "+v.amount(c.Seconds))
		}
	}
	if len(who) == 0 {
		return "-"
	}
	return strings.Join(who, ", ")
}

// check prints the total of packet work, the system's part of it, and how well the accounts
// agree with the total.
func (v netcpuView) check(w io.Writer) {
	measured := v.n.Softirq + v.n.Thread
	if measured <= 0 {
		fmt.Fprintln(w, "No packet was handled in softirqs or NAPI threads.")
		return
	}
	system := 0.0
	if v.n.Charged > 0 {
		system = v.n.System.Network() / v.n.Charged * 100
	}
	fmt.Fprintf(w, "Packets took %s%s in softirqs and %s%s in NAPI threads; %.1f %% of that was nobody's (system).\n",
		v.amount(v.n.Softirq), v.of(), v.amount(v.n.Thread), v.of(), system)
	fmt.Fprintf(w, "The accounts add up to %.1f %% of what was measured.\n", v.n.Charged/measured*100)
	if v.n.Lost > 0 {
		fmt.Fprintf(w, "A table in the kernel is full: %d charges could not record whose time they took.\n", v.n.Lost)
	}
}

// detail prints one container.
func (v netcpuView) detail(w io.Writer, a api.NetCPUAccount) {
	about := "id " + a.Container.String()
	if a.Ended {
		about += ", has ended"
	}
	fmt.Fprintf(w, "%s (%s)\n%s\n\n", v.names[a.Container], about, v.unit())
	type line struct{ what, time, note string }
	lines := []line{
		{"CPU time of its tasks", v.tasks(a), ""},
		{"  of that, into the packets of others", v.amount(a.Stolen), "STOLEN"},
		{"CPU time of its packets", v.amount(a.Network()), "RECV and SEND"},
		{"  of that, in its own time", v.amount(a.Own), ""},
		{"  of that, in the time of others", v.amount(a.Taken), "TOOK"},
		{"  of that, in nobody's", v.amount(max(0, a.Network()-a.Own-a.Taken)), "idle CPUs, ksoftirqd, the host's NAPI threads"},
	}
	if a.Periods > 0 || a.Throttled > 0 {
		lines = append(lines, line{"Kept from running by its own quota", v.amount(a.Throttled), fmt.Sprintf("in %d periods", a.Periods)})
	}
	columns.Print(w, lines,
		columns.Plain("", func(l line) string { return l.what }),
		columns.Number("", func(l line) string { return l.time }),
		columns.Plain("", func(l line) string { return l.note }),
	)
	v.enforced(w)

	work := slices.DeleteFunc(slices.Clone(a.Work), func(k api.NetCPUWork) bool { return k.Packets == 0 && !v.visible(k.Seconds) })
	fmt.Fprintln(w)
	if len(work) == 0 {
		fmt.Fprintln(w, "It had no packets.")
	} else {
		columns.Print(w, work,
			columns.Text("DIRECTION", func(k api.NetCPUWork) string { return k.Direction }),
			columns.Text("PROTOCOL", func(k api.NetCPUWork) string { return k.Protocol }),
			columns.Number("CPU", func(k api.NetCPUWork) string { return v.amount(k.Seconds) }),
			columns.Number(v.packets(), func(k api.NetCPUWork) string { return v.rate(k.Packets) }),
			columns.Number("NS/PKT", func(k api.NetCPUWork) string { return each(k.Seconds*1e9, k.Packets) }),
			columns.Number("BYTES/PKT", func(k api.NetCPUWork) string { return each(float64(k.Bytes), k.Packets) }),
		)
	}

	var by []theft
	for _, c := range a.StolenBy {
		by = append(by, theft{v.names[c.Container], c.Seconds})
	}
	v.thefts(w, "WHOSE PACKETS TOOK ITS TIME", by, "Nobody's packets took its time.")
	from := make(map[string]float64)
	for _, t := range v.n.Matrix {
		if t.Culprit == a.Container {
			from[v.party(t)] += t.Seconds
		}
	}
	var took []theft
	for name, seconds := range from {
		took = append(took, theft{name, seconds})
	}
	slices.SortFunc(took, func(x, y theft) int { return cmp.Or(cmp.Compare(y.seconds, x.seconds), cmp.Compare(x.name, y.name)) })
	v.thefts(w, "WHOSE TIME ITS PACKETS TOOK", took, "Its packets took nobody's time.")
}

// theft is time that one party took from a container, or lost to it.
type theft struct {
	name    string // safe to print
	seconds float64
}

func (v netcpuView) thefts(w io.Writer, head string, list []theft, none string) {
	list = slices.DeleteFunc(list, func(t theft) bool { return !v.visible(t.seconds) })
	fmt.Fprintln(w)
	if len(list) == 0 {
		fmt.Fprintln(w, none)
		return
	}
	columns.Print(w, list,
		columns.Plain(head, func(t theft) string { return t.name }).Cut(40),
		columns.Number("CPU", func(t theft) string { return v.amount(t.seconds) }),
	)
}

// party names the victim of a theft.
func (v netcpuView) party(t api.NetCPUTheft) string {
	switch {
	case t.Kind == api.VictimPeer:
		return "(who sent them: no loss)"
	case t.Victim != 0:
		return v.names[t.Victim]
	case t.Kind == api.VictimTask:
		return "(tasks of the host)"
	case t.Kind == api.VictimNAPI:
		return "(NAPI threads of the host)"
	case t.Kind == api.VictimKsoftirqd:
		return "(ksoftirqd)"
	case t.Kind == api.VictimIdle:
		return "(idle: no loss)"
	}
	return "(" + cli.Show(t.Kind) + ")"
}

// rate formats packets per second, or with --total packets.
func (v netcpuView) rate(packets uint64) string {
	n := float64(packets)
	if !v.flags.Total {
		if v.span <= 0 {
			return "0"
		}
		n /= v.span
	}
	return view.Scale(n)
}

func each(sum float64, packets uint64) string {
	return columns.If(packets > 0, fmt.Sprintf("%.0f", sum/float64(packets)))
}

// enforced prints the measures against containers: the limits that their ledgers set, and
// the packets that were dropped.
func (v netcpuView) enforced(w io.Writer) {
	dropped := "DROPPED PPS"
	if v.flags.Total {
		dropped = "DROPPED"
	}
	ledger := func(figure func(*api.NetCPULedger) float64) func(api.NetCPUAccount) string {
		return func(a api.NetCPUAccount) string {
			if a.Ledger == nil {
				return ""
			}
			return fmt.Sprintf("%.0f", figure(a.Ledger))
		}
	}
	limit := ledger(func(l *api.NetCPULedger) float64 { return l.Factor * 100 })
	balance := ledger(func(l *api.NetCPULedger) float64 { return math.Round(l.Balance*1000) + 0 }) // no "-0"
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
