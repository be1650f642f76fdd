package web

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

// containersBody is the table of all containers.
type containersBody struct {
	Plot    *timeline
	Columns []columnHead
	Rows    []row
	Filter  string
	Keep    []choice // of the form
	Clear   string   // the page without a filter
	Tree    choice
	All     int // containers without the filter
}

type columnHead struct {
	view.Column
	Link  string
	Order string // for aria-sort: ascending, descending or ""
}

type row struct {
	Link  string // of the container; "" for a pod
	Title string
	Below bool
	Cells []cell
}

type cell struct {
	Text, Head string
	Number     bool
	Heat       int // 0 to 10
	Empty      bool
}

// worst is how many containers the plot of the first page shows.
const worst = 5

func (s *Server) containers(_ *http.Request, l look, h *view.History) (page, error) {
	o, _ := h.At(l.to)
	b := containersBody{Filter: l.order.Filter, All: len(o.Rows), Keep: l.fields("filter")}
	b.Clear = l.link("", func(l *look) { l.order.Filter = "" })
	b.Tree = choice{"by pod", l.link("", func(l *look) { l.order.Tree = !l.order.Tree }), l.order.Tree}
	columns := view.Columns()
	sorted := cmp.Or(l.order.Sort, view.BySlowed)
	for _, c := range columns {
		head := columnHead{Column: c}
		head.Link = l.link("", func(l *look) {
			l.order.Reverse = c.Key == sorted && !l.order.Reverse
			l.order.Sort = c.Key
		})
		if c.Key == sorted {
			head.Order = map[bool]string{false: "descending", true: "ascending"}[l.order.Reverse != c.Text]
		}
		b.Columns = append(b.Columns, head)
	}
	for _, r := range view.Rows(o, l.order) {
		out := row{Below: r.Below, Title: view.Show(r.Name)}
		if r.Members == 0 {
			out.Link = l.container(r.Container)
		}
		for _, c := range columns {
			x := cell{Text: strings.TrimSpace(c.Cell(r)), Head: c.Head, Number: !c.Text}
			x.Empty = x.Text == "-"
			if c.Key == view.BySlowed {
				x.Heat = heat(r.Slowed)
			}
			out.Cells = append(out.Cells, x)
		}
		b.Rows = append(b.Rows, out)
	}
	b.Plot = slowedPlot(l, h, o)
	return page{Title: "Containers", Said: said(o), Body: b}, nil
}

// heat is the step of the scale of colours for a part of 1: 0 for nothing, 10 for 60 % and more.
func heat(part float64) int {
	if part < 0.005 {
		return 0
	}
	return min(int(part/0.06)+1, 10)
}

// said is the state of an overview in a sentence.
func said(o api.Overview) string {
	slowed := 0
	for _, r := range o.Rows {
		if r.Slowed >= 0.01 {
			slowed++
		}
	}
	if len(o.Rows) == 0 {
		return ""
	}
	if slowed == 0 {
		return "No container is slowed by its neighbours."
	}
	r := o.Rows[0]
	text := fmt.Sprintf("%s runs %s slower because of its neighbours", view.Show(r.Name), view.Percent(r.Slowed))
	if len(r.By) > 0 {
		text += fmt.Sprintf(", most of it by %s (%s)", view.Neighbour(r.By[0].Culprit, r.By[0].Name, r.By[0].Cause), view.Show(r.By[0].Cause))
	}
	switch slowed {
	case 1:
		return text + "."
	case 2:
		return text + "; one more container is slowed."
	}
	return text + fmt.Sprintf("; %d more containers are slowed.", slowed-1)
}

// slowedPlot shows the containers that are slowed most at any moment of the span.
func slowedPlot(l look, h *view.History, o api.Overview) *timeline {
	slowed := func(r api.OverviewRow) float64 { return r.Slowed }
	most := make(map[api.ID]float64)
	for n := 0; ; n-- {
		x, ok := h.Step(l.to, n)
		if !ok || x.Taken.Before(l.to.Add(-l.span)) {
			break
		}
		for _, r := range x.Rows {
			most[r.Container] = max(most[r.Container], r.Slowed)
		}
	}
	lines := slices.DeleteFunc(slices.Clone(o.Rows), func(r api.OverviewRow) bool { return most[r.Container] < 0.01 })
	slices.SortStableFunc(lines, func(a, b api.OverviewRow) int { return cmp.Compare(most[b.Container], most[a.Container]) })
	t := &timeline{look: l, ID: "slowed", Title: "Slowed by neighbours", form: view.Percent}
	for i, r := range lines[:min(len(lines), worst)] {
		values := h.Series(r.Container, slowed, l.to, l.span, parts(l, h))
		t.lines = append(t.lines, curve{Name: view.Show(r.Name), Ink: "s" + strconv.Itoa(i+1), Values: values})
	}
	if len(lines) > worst {
		t.Note = fmt.Sprintf("The %d that were slowed most, of %d.", worst, len(lines))
	}
	return t.done()
}

// containerBody is one container.
type containerBody struct {
	Figures []cell
	Plots   []*timeline
	By, Of  []share
	Actions []action
	Text    string // what policy says, and what was changed
}

type share struct {
	party
	Cause, Now, Mean string
	Heat             int
}

type action struct{ Age, Feature, Text string }

func (s *Server) container(r *http.Request, l look, h *view.History) (page, error) {
	n, err := strconv.ParseUint(r.PathValue("id"), 10, 64)
	if err != nil {
		return page{}, fmt.Errorf("%s is no id of a container", view.Show(r.PathValue("id")))
	}
	id := api.ID(n)
	o, _ := h.At(l.to)
	i := slices.IndexFunc(o.Rows, func(r api.OverviewRow) bool { return r.Container == id })
	if i < 0 {
		return page{}, fmt.Errorf("container %v does not run at %s", id, l.to.In(l.now0.Location()).Format(time.DateTime))
	}
	at := o.Rows[i]
	b := containerBody{Plots: containerPlots(l, h, at)}
	for _, c := range view.Columns() {
		if c.Key == view.ByName || c.Key == view.ByWhom {
			continue
		}
		x := cell{Head: c.Head, Text: c.Cell(view.Row{OverviewRow: at})}
		if c.Key == view.BySlowed {
			x.Heat = heat(at.Slowed)
		}
		b.Figures = append(b.Figures, x)
	}
	by, of := h.Blame(l.to, l.span)
	shares := func(list []view.Share) (out []share) {
		for _, x := range list {
			p := party{Name: view.Neighbour(x.Other, x.Name, x.Cause)}
			if slices.ContainsFunc(o.Rows, func(r api.OverviewRow) bool { return r.Container == x.Other }) {
				p.Link = l.container(x.Other)
			}
			out = append(out, share{p, view.Show(x.Cause), view.Percent(x.Now), view.Percent(x.Mean), heat(x.Mean)})
		}
		return out
	}
	b.By, b.Of = shares(by[id]), shares(of[id])
	if f := h.Last(); f != nil {
		for _, a := range view.Actions(*f, id) {
			b.Actions = append(b.Actions, action{view.Age(a.Since, l.to), view.Show(a.Feature), a.Text})
		}
	}
	b.Text = s.explain(r.Context(), l, h, id)
	text := "It is not slowed by its neighbours."
	if at.Slowed >= 0.01 {
		text = fmt.Sprintf("It runs %s slower because of its neighbours: %s.", view.Percent(at.Slowed), view.Reasons(at.By))
	}
	return page{Title: view.Show(at.Name), Said: text, Body: b}, nil
}

// explain is what policy says about a container; of now, also what was changed on the host for it.
func (s *Server) explain(ctx context.Context, l look, h *view.History, id api.ID) string {
	if l.now && s.agent != nil && s.o.Explain != nil {
		x, err := s.o.Explain(ctx, id)
		if err != nil {
			return api.Text(err)
		}
		return s.o.Text(x, true, l.now0)
	}
	if f := h.Last(); f != nil {
		for _, c := range f.Containers {
			if c.ID == id {
				return s.o.Text(api.Explanation{Container: c}, false, l.to)
			}
		}
	}
	return ""
}

// containerPlots are the plots of one container: what it has, and beside it what it is due.
func containerPlots(l look, h *view.History, at api.OverviewRow) (out []*timeline) {
	n := parts(l, h)
	series := func(figure func(api.OverviewRow) float64) []float64 {
		return h.Series(at.Container, figure, l.to, l.span, n)
	}
	slowed := &timeline{look: l, ID: "slowed", Title: "Slowed by neighbours", form: view.Percent}
	for _, cause := range []string{api.SlowedByPackets, api.SlowedByCPU, api.SlowedByUplink, api.SlowedByDisk} {
		values := series(func(r api.OverviewRow) (sum float64) {
			for _, s := range r.By {
				if s.Cause == cause {
					sum += s.Slowed
				}
			}
			return sum
		})
		if slices.ContainsFunc(values, func(v float64) bool { return v >= 0.005 }) {
			slowed.lines = append(slowed.lines, curve{Name: cause, Ink: cause, Values: values})
		}
	}
	out = append(out, slowed.done())
	columns := make(map[string]view.Column)
	for _, c := range view.Columns() {
		columns[c.Key] = c
	}
	for _, p := range []struct {
		title string
		lines []string
		names []string
		bound func(api.OverviewRow) float64
		of    string
	}{
		{"CPU", []string{"cpu", "packets"}, []string{"CPU", "of its packets"}, nil, ""},
		{"Sent", []string{"out"}, []string{"sent"}, func(r api.OverviewRow) float64 { return float64(r.Egress.Due) }, "guaranteed"},
		{"Received", []string{"in"}, []string{"received"}, func(r api.OverviewRow) float64 { return float64(r.Ingress.Due) }, "guaranteed"},
		{"Added latency, 99th percentile", []string{"added"}, []string{"added"}, nil, ""},
		{"Reads and writes per second", []string{"iops"}, []string{"achieved"}, func(r api.OverviewRow) float64 { return r.Reserved }, "reserved"},
	} {
		t := &timeline{look: l, ID: p.lines[0], Title: p.title, form: columns[p.lines[0]].Plot}
		for i, key := range p.lines {
			t.lines = append(t.lines, curve{Name: p.names[i], Ink: []string{"main", "second"}[i], Values: series(columns[key].Figure)})
		}
		if p.bound != nil && p.bound(at) > 0 {
			values := series(p.bound)
			for i, v := range values {
				if v == 0 {
					values[i] = math.NaN()
				}
			}
			t.lines = append(t.lines, curve{Name: p.of, Ink: "bound", Values: values, Dashed: true})
		}
		out = append(out, t.done())
	}
	return out
}

// blameBody is the matrix of victims and culprits.
type blameBody struct {
	Culprits []party
	Victims  []victim
	Causes   []choice
	Note     string
}

type party struct{ Name, Link string }

type victim struct {
	party
	Cells []blamed
	All   cell
}

type blamed struct {
	cell
	By string // the parts, by cause
}

// mostCulprits is how many columns the matrix has.
const mostCulprits = 24

func (s *Server) blame(_ *http.Request, l look, h *view.History) (page, error) {
	b := blameBody{}
	for _, c := range []string{"", api.SlowedByPackets, api.SlowedByCPU, api.SlowedByUplink, api.SlowedByDisk} {
		b.Causes = append(b.Causes, choice{cmp.Or(c, "all causes"), l.link("blame", func(l *look) { l.cause = c }), c == l.cause})
	}
	o, _ := h.At(l.to)
	type culprit struct { // of what has no id, the name says what it is
		id   api.ID
		name string
	}
	type line struct {
		victim
		by  map[culprit][]view.Share
		sum float64
	}
	var lines []line
	sums := make(map[culprit]float64)
	all, _ := h.Blame(l.to, l.span)
	for _, r := range o.Rows {
		x := line{victim: victim{party: party{view.Show(r.Name), l.container(r.Container)}}, by: make(map[culprit][]view.Share)}
		for _, share := range all[r.Container] {
			if l.cause == "" || share.Cause == l.cause {
				c := culprit{share.Other, view.Neighbour(share.Other, share.Name, share.Cause)}
				x.by[c] = append(x.by[c], share)
				x.sum += share.Mean
				sums[c] += share.Mean
			}
		}
		if x.sum >= 0.0005 {
			lines = append(lines, x)
		}
	}
	slices.SortStableFunc(lines, func(a, b line) int { return cmp.Compare(b.sum, a.sum) })
	culprits := slices.SortedFunc(maps.Keys(sums), func(a, b culprit) int {
		return cmp.Or(cmp.Compare(sums[b], sums[a]), cmp.Compare(a.name, b.name), cmp.Compare(a.id, b.id))
	})
	if n := len(culprits) - mostCulprits; n > 0 {
		b.Note = fmt.Sprintf("The %d containers to blame for most of it have columns; %d more are in the sums.", mostCulprits, n)
		culprits = culprits[:mostCulprits]
	}
	for _, c := range culprits {
		p := party{Name: c.name}
		if slices.ContainsFunc(o.Rows, func(r api.OverviewRow) bool { return r.Container == c.id }) {
			p.Link = l.container(c.id)
		}
		b.Culprits = append(b.Culprits, p)
	}
	for _, x := range lines {
		for _, c := range culprits {
			var why []string
			mean := 0.0
			for _, share := range x.by[c] {
				mean += share.Mean
				why = append(why, view.Show(share.Cause)+" "+view.Percent(share.Mean))
			}
			x.Cells = append(x.Cells, blamed{cell{Text: view.Percent(mean), Heat: heat(mean), Empty: mean == 0}, strings.Join(why, ", ")})
		}
		x.All = cell{Text: view.Percent(x.sum), Heat: heat(x.sum)}
		b.Victims = append(b.Victims, x.victim)
	}
	text := ""
	if h.Len() > 0 && len(b.Victims) == 0 {
		text = "In this time no container was slowed by its neighbours."
	}
	return page{Title: "Who slows whom", Said: text, Body: b}, nil
}
