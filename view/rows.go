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
	Members int  // of a pod: how many containers are below it; 0: the row is a container
	Below   bool // the row is below its pod
}

// Label is what the first column shows, safe to print: the name, or below its pod what is left
// of the name.
func (r Row) Label() string {
	if r.Members > 0 {
		return ShowText(r.Namespace) + "/" + ShowText(r.Pod)
	}
	if r.Below {
		return "  " + Show(cmp.Or(strings.TrimPrefix(r.Name, r.Namespace+"/"+r.Pod+"/"), r.Name))
	}
	return Show(r.Name)
}

// Order is what a view shows of an overview, and in which order.
type Order struct {
	Sort    string // key of a column; "" is BySlowed
	Reverse bool
	Filter  string // part of the name, the pod or the namespace, or of the name of a culprit, in any case; "": all
	Tree    bool   // containers below their pods
}

// Rows returns the rows of an overview in an order. Rows that are equal stay in the order of the
// overview, the most slowed first, then by name. A pod has the sums of its containers, and is
// slowed as much as the most slowed of them.
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

// tree puts rows, which are in order, below their pods, and the pods in order among the rest.
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

// add adds a container to the row of its pod. Containers of a pod share a network, whose figures
// are those of the pod in each of them where they are not counted apart; so the largest counts.
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

// Action is what fairlead does or has done for a container, or to it for others.
type Action struct {
	Since   time.Time
	Feature string // safe to print; "" for a decision in place of policy
	Text    string // safe to print
}

// Actions lists what a frame has on a container: decisions in place of policy, what is done about
// its disks, and what has happened to its reservations, the latest first.
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

// Age formats the time from t to now in one unit: "3 min"; "-" without a time.
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
