package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"

	"github.com/fairlead-project/fairlead/view/plot"
)

// Plot is one diagram of the page: a metric over several cases, off beside on.
type Plot struct {
	Title  string
	Note   string // what to look at, below the title
	Metric string
	Groups []Group
	// Ideal is a value that is drawn for comparison; 0 draws none.
	Ideal float64
}

// Group is one place on the plot.
type Group struct {
	Label string
	Case  string // as in Case.Case
}

//go:embed page.html.tmpl
var pageText string

// WriteHTML writes a page that a browser shows without network: the headline,
// the plots, and everything as a table.
func (r *Report) WriteHTML(w io.Writer, title, headline string, plots []Plot) error {
	t, err := template.New("page").Funcs(template.FuncMap{
		"bars":   r.bars,
		"format": Format,
		"median": Median,
		"spread": spread,
		"peer":   func(c Case, name string) []float64 { return c.Peers[name] },
		"ratio":  func(v float64) string { return fmt.Sprintf("%.2f", v) },
	}).Parse(pageText)
	if err != nil {
		return fmt.Errorf("parse page: %w", err)
	}
	return t.Execute(w, map[string]any{
		"Title": title, "Headline": headline, "Plots": plots, "Report": r, "Style": template.CSS(plot.Style),
		"Peers": r.peers(), "Env": r.Env.describe(), "Rounds": plural(r.Rounds, "round"),
	})
}

// bars draws a plot: for each group a bar for off, on and each peer, as long as the median, with
// the spread from 5 % to 95 %. The value that is due has a bar of its own below them.
func (r *Report) bars(p Plot) (template.HTML, error) {
	unit := "1"
	var bars []plot.Bar
	for _, g := range p.Groups {
		c, ok := r.Find(g.Case, p.Metric)
		if !ok {
			continue
		}
		unit = c.Unit
		first := len(bars)
		add := func(ink string, values []float64) {
			m := Median(values)
			if math.IsNaN(m) {
				return
			}
			low, high := Spread(values)
			bars = append(bars, plot.Bar{Ink: plot.Ink(ink), Low: low, Value: m, High: high, Text: tick(m, unit)})
		}
		add("off", c.Off)
		add("on", c.On)
		for i, name := range r.peers() {
			add(fmt.Sprintf("peer%d", i), c.Peers[name])
		}
		if first < len(bars) {
			bars[first].Label, bars[first].Gap = g.Label, true
		}
	}
	if p.Ideal > 0 && len(bars) > 0 {
		bars = append(bars, plot.Bar{Label: "due", Ink: "ideal", Low: p.Ideal, Value: p.Ideal, High: p.Ideal, Text: tick(p.Ideal, unit), Gap: true})
	}
	return plot.Bars(p.Title, bars, func(v float64) string { return tick(v, unit) })
}

// tick is a value without the part of the unit that the title says.
func tick(v float64, unit string) string {
	s := Format(v, unit)
	s = strings.TrimSuffix(s, "/s")
	return strings.TrimSuffix(s, "bit")
}
