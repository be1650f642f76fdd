package web

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

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
	return page{Title: view.Show(at.Name), Said: saidOf(at), Body: b}, nil
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

func saidOf(r api.OverviewRow) string {
	if r.Slowed < 0.01 {
		return "It is not slowed by its neighbours."
	}
	return fmt.Sprintf("It runs %s slower because of its neighbours: %s.", view.Percent(r.Slowed), view.Reasons(r.By))
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
