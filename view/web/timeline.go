package web

import (
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/view"
)

// timeline is a plot over the span of a look, with the texts that stand around it.
type timeline struct {
	ID, Title, Note string
	Lines           []legend
	Ticks           []string // from the top
	Times           []string // from the left
	SVG             template.HTML
	Data            string // for the script: what it shows below the pointer
	Flat            bool   // there is nothing to see

	look  look
	form  func(float64) string
	lines []curve
}

// legend is the key of one line.
type legend struct {
	curve
	Last, Most string
}

// parts is in how many parts a plot divides its span: so few that each has a value, where frames
// lie at equal distances.
func parts(l look, h *view.History) int {
	const fewest, mostParts = 10, 150
	first, last := h.Bounds()
	if h.Len() < 2 {
		return fewest
	}
	part := last.Sub(first).Seconds() / float64(h.Len()-1) * 1.5
	return min(max(int(l.span.Seconds()/max(part, 0.1)), fewest), mostParts)
}

// data is what the script knows of a plot.
type data struct {
	From  int64      `json:"from"` // Unix time in milliseconds
	To    int64      `json:"to"`
	Names []string   `json:"names"`
	Inks  []string   `json:"inks"`
	Texts [][]string `json:"texts"` // for each line, a text for each part
}

// done draws what was added.
func (t *timeline) done() *timeline {
	top := 0.0
	d := data{From: t.look.to.Add(-t.look.span).UnixMilli(), To: t.look.to.UnixMilli()}
	for _, l := range t.lines {
		key := legend{curve: l, Last: "-", Most: "-"}
		most := math.Inf(-1)
		var texts []string
		for _, v := range l.Values {
			text := ""
			if !math.IsNaN(v) {
				text = t.form(v)
				key.Last, most = text, max(most, v)
			}
			texts = append(texts, text)
		}
		if !math.IsInf(most, 0) {
			key.Most, top = t.form(most), max(top, most)
		}
		t.Lines = append(t.Lines, key)
		d.Names, d.Inks, d.Texts = append(d.Names, l.Name), append(d.Inks, l.Ink), append(d.Texts, texts)
	}
	t.Flat = top == 0
	ticks := ticksTo(top)
	for _, v := range slices.Backward(ticks) {
		text := t.form(v)
		if t.Flat && v > 0 {
			text = ""
		}
		t.Ticks = append(t.Ticks, text)
	}
	layout := time.TimeOnly
	switch {
	case t.look.span > 24*time.Hour:
		layout = "Jan 2 15:04"
	case t.look.span > 20*time.Minute:
		layout = "15:04"
	}
	const marks = 4
	for i := range marks + 1 {
		at := t.look.to.Add(-t.look.span + time.Duration(i)*t.look.span/marks)
		t.Times = append(t.Times, at.In(t.look.now0.Location()).Format(layout))
	}
	t.SVG = draw(t.lines, ticks)
	text, _ := json.Marshal(d) // never fails for numbers and strings
	t.Data = string(text)
	return t
}

// curve is one figure over time.
type curve struct {
	Name   string
	Ink    string    // a colour of style.css: the class "ink-NAME"
	Values []float64 // at equal distances; NaN where there is none
	Dashed bool      // a bound, not a measurement
}

// The view box of a diagram. The page stretches it to the place that it has.
const (
	linesWidth  = 1000
	linesHeight = 200
)

// draw draws curves, which must have equally many values, from 0 to the last of ticks, as SVG. The
// diagram has grid lines, but no text: it is as wide and high as its element, and the page writes the
// ticks beside it.
func draw(lines []curve, ticks []float64) template.HTML {
	var svg strings.Builder
	fmt.Fprintf(&svg, `<svg viewBox="0 0 %d %d" class="lines" preserveAspectRatio="none" aria-hidden="true">`, linesWidth, linesHeight)
	top := ticks[len(ticks)-1]
	for _, t := range ticks {
		stroke(&svg, []float64{t, t}, top, "grid")
	}
	for _, l := range lines {
		class := l.Ink
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

// ticksTo returns round values from 0 to at least top, at equal distances, three to six of them.
func ticksTo(top float64) []float64 {
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
