// Package plot draws the diagrams of fairlead's pages as SVG: lines over time. Colours are classes of
// [Style], so that one diagram suits light and dark pages, and a page may forbid inline styles. It
// knows no containers and writes no page; package view/web calls it.
package plot

import (
	_ "embed"
	"fmt"
	"html/template"
	"math"
	"strings"
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
func Lines(lines []Line, ticks []float64) template.HTML {
	var svg strings.Builder
	fmt.Fprintf(&svg, `<svg viewBox="0 0 %d %d" class="lines" preserveAspectRatio="none" aria-hidden="true">`, linesWidth, linesHeight)
	top := ticks[len(ticks)-1]
	for _, t := range ticks {
		stroke(&svg, []float64{t, t}, top, "grid")
	}
	for _, l := range lines {
		class := string(l.Ink)
		if l.Dashed {
			class += " dashed"
		}
		stroke(&svg, l.Values, top, class)
	}
	svg.WriteString("</svg>")
	return template.HTML(svg.String())
}

// stroke draws the parts of a line that have values. A single value is a dot.
func stroke(svg *strings.Builder, values []float64, top float64, class string) {
	var path []string
	end := func() {
		if len(path) == 1 {
			path = append(path, path[0])
		}
		if len(path) > 0 {
			fmt.Fprintf(svg, `<path d="M %s" class="stroke ink-%s"/>`, strings.Join(path, " L "), class)
		}
		path = nil
	}
	for i, v := range values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			end()
			continue
		}
		x, y := float64(i)/float64(max(len(values)-1, 1))*linesWidth, linesHeight*(1-v/top)
		path = append(path, fmt.Sprintf("%.0f %.0f", x, y))
	}
	end()
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
