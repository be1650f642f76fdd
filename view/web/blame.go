package web

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/view"
)

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
