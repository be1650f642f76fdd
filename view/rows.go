package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
)

// Row is a row of the table of containers: a container, or a pod above its containers.
type Row struct {
	api.OverviewRow
	Members int  // number of containers below a pod; 0: the row is a container
	Below   bool // the row is below its pod
}

// Label returns the text of the first column, safe to print: the name, or below a pod the part of
// the name that differs.
func (r Row) Label() string {
	if r.Members > 0 {
		return ShowText(r.Namespace) + "/" + ShowText(r.Pod)
	}
	if r.Below {
		return "  " + Show(cmp.Or(strings.TrimPrefix(r.Name, r.Namespace+"/"+r.Pod+"/"), r.Name))
	}
	return Show(r.Name)
}

// Order selects and orders the rows of an overview for a view.
type Order struct {
	Sort    string // key of a column; "" is BySlowed
	Reverse bool
	Filter  string // part of the name, pod or namespace, or of a culprit's name, in any case; "": all
	Tree    bool   // containers below their pods
}

// Rows returns the ordered rows of an overview. Equal rows keep the order of the overview: the most
// slowed first, then by name. A pod has the sums of its containers, and the slowdown of the one
// that is slowed most.
func Rows(o api.Overview, by Order) []Row {
	var rows []Row
	for _, r := range o.Rows {
		if by.matches(r) {
			rows = append(rows, Row{OverviewRow: r})
		}
	}
	compare := func(a, b Row) int { return 0 }
	for _, c := range Columns() {
		if c.Key == cmp.Or(by.Sort, BySlowed) {
			compare = c.less
		}
	}
	order := func(rows []Row) {
		slices.SortStableFunc(rows, func(a, b Row) int {
			if by.Reverse {
				return compare(b, a)
			}
			return compare(a, b)
		})
	}
	order(rows)
	if !by.Tree {
		return rows
	}
	return tree(rows, order)
}

func (by Order) matches(r api.OverviewRow) bool {
	want := strings.ToLower(by.Filter)
	has := func(s string) bool { return strings.Contains(strings.ToLower(s), want) }
	return want == "" || has(r.Name) || has(r.Namespace+"/"+r.Pod) ||
		slices.ContainsFunc(r.By, func(s api.Slowdown) bool { return has(s.Name) })
}

// tree puts the ordered rows below their pods, and orders the pods among the other rows.
func tree(rows []Row, order func([]Row)) []Row {
	type pod struct{ namespace, name string }
	members := make(map[pod][]Row)
	var tops []Row
	for _, r := range rows {
		p := pod{r.Namespace, r.Pod}
		if r.Pod == "" {
			tops = append(tops, r)
			continue
		}
		r.Below = true
		members[p] = append(members[p], r)
		if len(members[p]) == 1 {
			tops = append(tops, Row{OverviewRow: api.OverviewRow{Name: r.Namespace + "/" + r.Pod, Pod: r.Pod, Namespace: r.Namespace}, Members: 1})
		}
	}
	for i, t := range tops {
		if t.Members > 0 {
			list := members[pod{t.Namespace, t.Pod}]
			tops[i].Members = len(list)
			for _, r := range list {
				tops[i].add(r.OverviewRow)
			}
		}
	}
	order(tops)
	out := make([]Row, 0, len(rows)+len(members))
	for _, t := range tops {
		out = append(out, t)
		if t.Members > 0 {
			out = append(out, members[pod{t.Namespace, t.Pod}]...)
		}
	}
	return out
}

// add adds a container to the row of its pod. Containers of a pod share a network. Where its figures
// are not counted per container, each container has those of the pod, so the largest counts.
func (r *Row) add(m api.OverviewRow) {
	if m.Slowed > r.Slowed {
		r.Slowed, r.By = m.Slowed, m.By
	}
	r.CPU += m.CPU
	r.NetworkCPU += m.NetworkCPU
	for _, rate := range []struct{ sum, m *api.OverviewRate }{{&r.Egress, &m.Egress}, {&r.Ingress, &m.Ingress}} {
		rate.sum.Achieved = max(rate.sum.Achieved, rate.m.Achieved)
		rate.sum.Due, rate.sum.Ceil = max(rate.sum.Due, rate.m.Due), max(rate.sum.Ceil, rate.m.Ceil)
	}
	r.Added = max(r.Added, m.Added)
	r.IOPS += m.IOPS
	r.Reserved += m.Reserved
	for _, f := range m.InForce {
		if !slices.Contains(r.InForce, f) {
			r.InForce = append(r.InForce, f)
		}
	}
}

// Action is something that fairlead does or did for a container, or to it for others.
type Action struct {
	Since   time.Time
	Feature string // safe to print; "" for a decision in place of policy
	Text    string // safe to print
}

// Actions lists a frame's decisions, actions on disks and events of a container, the latest first.
func Actions(f api.Frame, id api.ID) []Action {
	var list []Action
	for _, c := range f.Containers {
		if c.ID != id {
			continue
		}
		for _, s := range c.Policy {
			if s.Reason != "" {
				list = append(list, Action{s.Since, "", fmt.Sprintf("%s = %s in place of %s: %s", Show(s.Key), Show(s.Value), Show(s.Instead), ShowText(s.Reason))})
			}
		}
	}
	for _, a := range f.Actions(id) {
		list = append(list, Action{a.Time, Show(a.Feature), ShowText(a.Text)})
	}
	slices.SortStableFunc(list, func(a, b Action) int { return b.Since.Compare(a.Since) })
	return list
}

// Age formats the time from t to now in one unit: "3 min"; "-" if t is zero.
func Age(t, now time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "-"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(max(d, 0).Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// Column is one column of the table of containers. All views share it.
type Column struct {
	Key  string // its name in flags and links
	Head string
	Help string // what it shows, as a sentence without a full stop
	Text bool   // text, not a number
	// Cell returns the text of the column for a row, safe to print.
	Cell func(Row) string
	// Figure returns the value to plot for the column; nil: there is no plot.
	Figure func(api.OverviewRow) float64
	// Plot formats a value of a plot.
	Plot func(float64) string

	less func(a, b Row) int
}

// The keys of columns that views treat specially.
const (
	ByName   = "name"
	BySlowed = "slowed"
	ByWhom   = "by"
)

// Columns returns the columns in the order of the views.
func Columns() []Column {
	figure := func(key, head, help string, value func(api.OverviewRow) float64, plot func(float64) string) Column {
		return Column{Key: key, Head: head, Help: help, Figure: value, Plot: plot,
			Cell: func(r Row) string {
				if v := value(r.OverviewRow); v > 0 {
					return plot(v)
				}
				return "-"
			},
			less: func(a, b Row) int { return cmp.Compare(value(b.OverviewRow), value(a.OverviewRow)) }}
	}
	against := func(c Column, bound func(api.OverviewRow) float64) Column {
		c.Cell = func(r Row) string { return of(c.Figure(r.OverviewRow), bound(r.OverviewRow)) }
		return c
	}
	return []Column{
		{Key: ByName, Head: "CONTAINER", Help: "name of the container", Text: true,
			Cell: func(r Row) string { return r.Label() },
			less: func(a, b Row) int { return cmp.Compare(a.Name, b.Name) }},
		figure(BySlowed, "SLOWED", "how much slower it runs because of its neighbours",
			func(r api.OverviewRow) float64 { return r.Slowed }, Percent),
		{Key: ByWhom, Head: "BY", Text: true,
			Help: "who is most to blame for that, and by what: packets (CPU time that went into them), cpu (waits for a CPU), uplink (waits in its queue), disk; +1 is one more reason",
			Cell: func(r Row) string { return Blame(r.By) },
			less: func(a, b Row) int { return cmp.Compare(first(b.By).Slowed, first(a.By).Slowed) }},
		figure("cpu", "CPU", "CPU time that it uses, in percent of one CPU",
			func(r api.OverviewRow) float64 { return r.CPU }, cpu),
		figure("packets", "NET", "CPU time of its packets, wherever that ran, in percent of one CPU",
			func(r api.OverviewRow) float64 { return r.NetworkCPU }, cpu),
		against(figure("out", "OUT/DUE", "what it sends, in bit/s, and the bandwidth that it is guaranteed",
			func(r api.OverviewRow) float64 { return r.Egress.Achieved }, Bits),
			func(r api.OverviewRow) float64 { return float64(r.Egress.Due) }),
		against(figure("in", "IN/DUE", "what it receives, likewise",
			func(r api.OverviewRow) float64 { return r.Ingress.Achieved }, Bits),
			func(r api.OverviewRow) float64 { return float64(r.Ingress.Due) }),
		figure("added", "P99", "latency that the host adds to its packets: 99 % are not delayed longer",
			func(r api.OverviewRow) float64 { return r.Added }, Brief),
		against(figure("iops", "IOPS/RSV", "reads and writes per second, and those that it has reserved",
			func(r api.OverviewRow) float64 { return r.IOPS }, Scale),
			func(r api.OverviewRow) float64 { return r.Reserved }),
		{Key: "force", Head: "IN FORCE", Help: "features that do something for it, with their state where that is not done", Text: true,
			Cell: func(r Row) string { return listed(r.InForce) },
			less: func(a, b Row) int { return cmp.Compare(len(b.InForce), len(a.InForce)) }},
	}
}

func cpu(v float64) string {
	if v < 0.0995 {
		return fmt.Sprintf("%.1f%%", 100*v)
	}
	return fmt.Sprintf("%.0f%%", 100*v)
}

func first(by []api.Slowdown) api.Slowdown {
	if len(by) == 0 {
		return api.Slowdown{}
	}
	return by[0]
}

// Blame names the largest of the slowdowns: "flood: packets".
func Blame(by []api.Slowdown) string {
	if len(by) == 0 {
		return "-"
	}
	text := Neighbour(by[0].Culprit, by[0].Name, by[0].Cause) + ": " + Show(by[0].Cause)
	if len(by) > 1 {
		text += fmt.Sprintf(" +%d", len(by)-1)
	}
	return text
}

// Reasons says in one line who slows a container and how, the largest part first.
func Reasons(by []api.Slowdown) string {
	parts := make([]string, len(by))
	for i, s := range by {
		parts[i] = fmt.Sprintf("%s: %s %s", Neighbour(s.Culprit, s.Name, s.Cause), Show(s.Cause), Percent(s.Slowed))
	}
	return strings.Join(parts, ", ")
}

func listed(list []string) string {
	if len(list) == 0 {
		return "-"
	}
	shown := make([]string, len(list))
	for i, s := range list {
		shown[i] = ShowText(s)
	}
	return strings.Join(shown, ", ")
}
