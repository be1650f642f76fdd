// Package plot draws the diagrams of fairlead's pages as SVG, with go-analyze/charts: lines over
// time. Colours and fonts are classes of [Style], so that one diagram suits light and dark pages, and
// a page may forbid inline styles. It knows no containers and writes no page; package view/web calls
// it.
//
// The text of a diagram may be hostile: it is escaped.
//
// The library costs the binary, which is the agent's too, 0.8 MB, and each process 0.5 MB of memory.
// gonum.org/v1/plot costs 6.1 MB and 2.8 MB, because it parses its fonts at start.
package plot

import (
	_ "embed"
	"fmt"
	"html/template"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/go-analyze/charts"
)

// Style is the style sheet of diagrams and pages: the colours in light and dark, and the classes
// of what the package draws.
//
//go:embed style.css
var Style string

// Ink is a colour of Style. A diagram carries it as the class "ink-NAME".
type Ink string

// Line is one figure over time.
type Line struct {
	Name   string
	Ink    Ink
	Values []float64 // at equal distances; NaN where there is none
	Dashed bool      // a bound, not a measurement
}

// The view box of Lines. The page stretches it to the place that it has.
const (
	linesWidth  = 1000
	linesHeight = 200
)

// Lines draws lines over time, which must have equally many values, from 0 to the last of ticks.
// The diagram has grid lines, but no text: it is as wide and high as its element, and the page
// writes the ticks beside it.
func Lines(lines []Line, ticks []float64) (template.HTML, error) {
	inks := []Ink{"grid"}
	var values [][]float64
	for _, l := range lines {
		ink := l.Ink
		if l.Dashed {
			ink += " dashed"
		}
		inks = append(inks, ink)
		row := slices.Clone(l.Values)
		for i, v := range row {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				row[i] = charts.GetNullValue()
			}
		}
		if len(row) == 1 { // of one value there is no line
			row = append(row, row[0])
		}
		values = append(values, row)
	}
	p := paper(linesWidth, linesHeight, inks)
	top := ticks[len(ticks)-1]
	for _, t := range ticks {
		y := int(math.Round(linesHeight * (1 - t/top)))
		p.LineStroke([]charts.Point{{X: 0, Y: y}, {X: linesWidth, Y: y}}, sentinel(0), 1)
	}
	if len(values) > 0 && len(values[0]) > 0 {
		opt := charts.NewLineChartOptionWithData(values)
		opt.Theme = theme(inks[1:], 1)
		opt.Padding = charts.NewBoxEqual(0)
		opt.XAxis = charts.XAxisOption{Show: charts.Ptr(false), BoundaryGap: charts.Ptr(false)}
		opt.YAxis = []charts.YAxisOption{{Show: charts.Ptr(false), Min: charts.Ptr(0.0), Max: charts.Ptr(top)}}
		opt.Legend.Show = charts.Ptr(false)
		opt.Symbol = charts.Symbol{Shape: charts.SymbolNone}
		if err := p.LineChart(opt); err != nil {
			return "", fmt.Errorf("draw lines: %w", err)
		}
	}
	return finish(p, inks, `class="lines" preserveAspectRatio="none" aria-hidden="true"`)
}

// paper makes what charts draw on.
func paper(width, height int, inks []Ink) *charts.Painter {
	return charts.NewPainter(charts.PainterOptions{OutputFormat: charts.ChartOutputSVG, Width: width, Height: height},
		charts.PainterThemeOption(theme(inks, 0)))
}

// sentinel is the colour that stands for the i-th ink until finish makes it a class.
func sentinel(i int) charts.Color { return charts.Color{R: 1, G: uint8(i), B: 254, A: 255} }

// The sentinels of what is not drawn with the inks of a diagram.
const (
	gridInk = 200 + iota
	textInk
)

// theme returns the sentinels of inks, of which the first is the one with the number from.
func theme(inks []Ink, from int) charts.ColorPalette {
	colours := make([]charts.Color, max(len(inks), 1))
	for i := range colours {
		colours[i] = sentinel(from + i)
	}
	grid := sentinel(gridInk)
	return charts.GetTheme(charts.ThemeLight).WithSeriesColors(colours).WithBackgroundColor(charts.Color{}).
		WithTextColor(sentinel(textInk)).WithXAxisColor(grid).WithYAxisColor(grid).WithAxisSplitLineColor(grid).
		WithXAxisTextColor(sentinel(textInk)).WithYAxisTextColor(sentinel(textInk))
}

var (
	head      = regexp.MustCompile(`^<svg [^>]*viewBox="([^"]*)">`)
	invisible = regexp.MustCompile(`<path[^>]*style="stroke:none;fill:none"/>`)
	styled    = regexp.MustCompile(`style="([^"]*)"`)
	inked     = regexp.MustCompile(`(stroke|fill):rgb\(1,(\d+),254\)`)
)

// finish returns the diagram with classes in place of styles, and attributes of its own.
func finish(p *charts.Painter, inks []Ink, attributes string) (template.HTML, error) {
	data, err := p.Bytes()
	if err != nil {
		return "", fmt.Errorf("draw diagram: %w", err)
	}
	text := invisible.ReplaceAllString(string(data), "")
	text = styled.ReplaceAllStringFunc(text, func(style string) string {
		m := inked.FindStringSubmatch(style)
		if m == nil {
			return `class="none"`
		}
		var n int
		fmt.Sscan(m[2], &n)
		name := "none"
		switch {
		case n < len(inks):
			name = string(inks[n])
		case n == gridInk:
			name = "grid"
		case n == textInk:
			name = "text"
		}
		return `class="` + m[1] + " ink-" + name + `"`
	})
	text = head.ReplaceAllString(text, `<svg viewBox="$1" `+attributes+`>`)
	return template.HTML(strings.ReplaceAll(text, "\n", " ")), nil
}

// Ticks returns round values from 0 to at least top, at equal distances, three to six of them.
func Ticks(top float64) []float64 {
	if !(top > 0) || math.IsInf(top, 0) {
		return []float64{0, 1}
	}
	size := math.Pow(10, math.Floor(math.Log10(top)))
	for _, f := range []float64{0.2, 0.25, 0.5, 1, 2, 2.5} {
		if n := math.Ceil(top/(f*size) - 1e-9); n <= 5 {
			var ticks []float64
			for i := 0.0; i <= n; i++ {
				ticks = append(ticks, i*f*size)
			}
			return ticks
		}
	}
	return []float64{0, top} // not reached: top is below 10 sizes
}
