package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// screen is the maximum width of a table where no terminal reports its own.
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
	case !v.flags.total:
		return fmt.Sprintf("%.1f", v.percent(sec))
	case sec < 1000:
		return fmt.Sprintf("%.2f", sec)
	}
	return fmt.Sprintf("%.0f", sec)
}

func (v netcpuView) percent(sec float64) float64 {
	if v.span <= 0 {
		return 0
	}
	return sec / v.span * 100
}

// visible reports whether amount shows more than zeros.
func (v netcpuView) visible(sec float64) bool { return strings.Trim(v.amount(sec), "0.") != "" }

// unit describes the unit of a table.
func (v netcpuView) unit() string {
	if v.flags.total {
		return fmt.Sprintf("CPU seconds since %s (%s)", v.n.Since.Local().Format(time.DateTime), span(v.n.Taken.Sub(v.n.Since)))
	}
	return "Percent of one CPU, over " + span(v.n.Taken.Sub(v.n.Since))
}

func (v netcpuView) of() string {
	if v.flags.total {
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
		fmt.Fprintf(w, "No container runs here, and no packet was handled in %s.\n", span(v.n.Taken.Sub(v.n.Since)))
		return
	}
	rate := "PPS"
	if v.flags.total {
		rate = "PACKETS"
	}
	columns := []column{{"CONTAINER", 20}, {"TASKS", 0}, {"RECV", 0}, {"SEND", 0}, {"STOLEN", 0}, {"TOOK", 0}, {rate, 0}, {"NS/PKT", 0}, {"HELD BACK BY", 0}}
	var rows [][]string
	quiet := 0
	for _, a := range append(slices.Clone(v.n.Accounts), v.n.System) {
		if !slices.ContainsFunc([]float64{a.Tasks, a.Network(), a.Stolen, a.Taken, a.Throttled}, v.visible) {
			if a.Container != 0 {
				quiet++
			}
			continue
		}
		tasks, stolen, cost := "-", "-", "-"
		if a.Container != 0 { // the system also uses time for other work than packets
			stolen, cost = v.amount(a.Stolen), each(a.Network(), a.Packets())
		}
		if a.Tasks > 0 {
			tasks = v.amount(a.Tasks)
		}
		rows = append(rows, []string{
			v.names[a.Container], tasks, v.amount(a.Receive), v.amount(a.Send), stolen, v.amount(a.Taken),
			v.rate(a.Packets()), cost, v.heldBack(a),
		})
	}
	if len(rows) == 0 {
		fmt.Fprintf(w, "No container did anything, and no packet was handled for one, in %s.\n", span(v.n.Taken.Sub(v.n.Since)))
		v.uplinks(w)
		return
	}
	fmt.Fprintln(w, v.unit())
	right(columns, rows, 1, 7)
	if v.flags.wide {
		columns[0].max = 0
	} else {
		columns[8].max = max(leastCut, cli.Across(w, screen)-width(columns[:8], rows))
	}
	table(w, columns, rows)
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
	lines := [][]string{
		{"CPU time of its tasks", v.amount(a.Tasks), ""},
		{"  of that, into the packets of others", v.amount(a.Stolen), "STOLEN"},
		{"CPU time of its packets", v.amount(a.Network()), "RECV and SEND"},
		{"  of that, in its own time", v.amount(a.Own), ""},
		{"  of that, in the time of others", v.amount(a.Taken), "TOOK"},
		{"  of that, in nobody's", v.amount(max(0, a.Network()-a.Own-a.Taken)), "idle CPUs, ksoftirqd, the host's NAPI threads"},
	}
	if a.Tasks == 0 {
		lines[0][1] = "-"
	}
	if a.Periods > 0 || a.Throttled > 0 {
		lines = append(lines, []string{"Kept from running by its own quota", v.amount(a.Throttled), fmt.Sprintf("in %d periods", a.Periods)})
	}
	columns := []column{{}, {}, {}}
	right(columns, lines, 1, 1)
	plain(w, lines)
	v.enforced(w)

	rate := "PPS"
	if v.flags.total {
		rate = "PACKETS"
	}
	columns = []column{{"DIRECTION", 0}, {"PROTOCOL", 0}, {"CPU", 0}, {rate, 0}, {"NS/PKT", 0}, {"BYTES/PKT", 0}}
	var rows [][]string
	for _, k := range a.Work {
		if k.Packets == 0 && !v.visible(k.Seconds) {
			continue
		}
		bytes := "-"
		if k.Packets > 0 {
			bytes = fmt.Sprintf("%.0f", float64(k.Bytes)/float64(k.Packets))
		}
		rows = append(rows, []string{cli.Show(k.Direction), cli.Show(k.Protocol), v.amount(k.Seconds), v.rate(k.Packets), each(k.Seconds, k.Packets), bytes})
	}
	fmt.Fprintln(w)
	if len(rows) == 0 {
		fmt.Fprintln(w, "It had no packets.")
	} else {
		right(columns, rows, 2, 5)
		table(w, columns, rows)
	}

	var by [][]string
	for _, c := range a.StolenBy {
		if v.visible(c.Seconds) {
			by = append(by, []string{v.names[c.Container], v.amount(c.Seconds)})
		}
	}
	v.parties(w, "WHOSE PACKETS TOOK ITS TIME", by, "Nobody's packets took its time.")
	from := make(map[string]float64)
	for _, t := range v.n.Matrix {
		if t.Culprit == a.Container {
			from[v.party(t)] += t.Seconds
		}
	}
	var took [][]string
	for _, name := range slices.SortedFunc(maps.Keys(from), func(x, y string) int { return cmp.Or(cmp.Compare(from[y], from[x]), cmp.Compare(x, y)) }) {
		if v.visible(from[name]) {
			took = append(took, []string{name, v.amount(from[name])})
		}
	}
	v.parties(w, "WHOSE TIME ITS PACKETS TOOK", took, "Its packets took nobody's time.")
}

func (v netcpuView) parties(w io.Writer, head string, rows [][]string, none string) {
	fmt.Fprintln(w)
	if len(rows) == 0 {
		fmt.Fprintln(w, none)
		return
	}
	columns := []column{{head, 40}, {"CPU", 0}}
	right(columns, rows, 1, 1)
	table(w, columns, rows)
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
	if !v.flags.total {
		if v.span <= 0 {
			return "0"
		}
		n /= v.span
	}
	for _, unit := range []struct {
		size float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if n >= unit.size {
			return fmt.Sprintf("%.3g%s", n/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%.0f", n)
}

func each(sec float64, packets uint64) string {
	if packets == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", sec*1e9/float64(packets))
}

// span formats a time in one unit.
func span(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.1f h", d.Hours())
	}
	return fmt.Sprintf("%.1f days", d.Hours()/24)
}

// right aligns columns first to last, and their heads, to the right.
func right(columns []column, rows [][]string, first, last int) {
	for i := first; i <= last; i++ {
		wide := column{head: columns[i].head}.width(i, rows) // a number is never cut
		columns[i].head = fmt.Sprintf("%*s", wide, columns[i].head)
		for _, row := range rows {
			row[i] = fmt.Sprintf("%*s", wide, row[i])
		}
	}
}

// width is the width of columns, including the space after each.
func width(columns []column, rows [][]string) int {
	sum := 0
	for i, c := range columns {
		sum += c.width(i, rows) + 2
	}
	return sum
}

// plain prints rows without heads.
func plain(w io.Writer, rows [][]string) {
	wide := column{}.width(0, rows)
	for _, row := range rows {
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-*s  %s  %s", wide, row[0], row[1], row[2]), " "))
	}
}
