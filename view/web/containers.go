package web

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

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
