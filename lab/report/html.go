package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
)

// Plot is one diagram of the page: a metric over several cases, off beside on.
type Plot struct {
	Title  string
	Note   string // what to look at, below the title
	Metric string
	Groups []Group
	// Ideal is where a line is drawn for comparison; 0 draws none.
	Ideal float64
}

// Group is one place on the plot's horizontal axis.
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
		"svg":    r.svg,
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
		"Title": title, "Headline": headline, "Plots": plots, "Report": r,
		"Peers": r.peers(), "Env": r.Env.describe(), "Rounds": plural(r.Rounds, "round"),
	})
}
