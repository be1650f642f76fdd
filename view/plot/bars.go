package plot

import (
	"fmt"
	"html/template"
	"math"
	"slices"

	"github.com/go-analyze/charts"
)

// Bar is one row of a bar diagram: a value with its spread. A NaN draws nothing.
type Bar struct {
	Label            string // left of the bar; "" if the row above says it
	Ink              Ink
	Low, Value, High float64 // the spread is from Low to High
	Text             string  // the value, right of the bar
	Gap              bool    // the row begins another group
}

// What Bars takes, in units of the view box. Text is 12 units high.
const (
	barsWidth = 440
	barHeight = 18
	axisFoot  = 26
	textRoom  = 66 // right of the longest bar
	fontSize  = 9.0
)

// Bars draws one bar below the other. A bar has its full colour up to Low, is paler from there to
// the value, and the palest up to High; its text stands behind it. format writes the values of the
// axis. title is for those who cannot see the diagram.
func Bars(title string, bars []Bar, format func(float64) string) (template.HTML, error) {
	// The library gives every row the same height, so a gap between groups is a row too. It draws
	// from the bottom.
	var rows []Bar
	for i, b := range bars {
		if b.Gap && i > 0 {
			rows = append(rows, Bar{Value: math.NaN()})
		}
		rows = append(rows, b)
	}
	slices.Reverse(rows)
	var inks []Ink
	var list charts.BarSeriesList
	labels := make([]string, len(rows))
	top := 0.0
	for i, b := range rows {
		labels[i] = b.Label
		if math.IsNaN(b.Value) {
			continue
		}
		low, high := min(b.Low, b.Value), max(b.High, b.Value)
		top = max(top, high)
		for part, length := range []float64{low, b.Value - low, high - b.Value} {
			if length > 0 || part == 0 { // the first one is there for each bar
				values := slices.Repeat([]float64{charts.GetNullValue()}, len(rows))
				values[i] = length
				list = append(list, charts.BarSeries{Values: values})
				inks = append(inks, b.Ink+[]Ink{"", " part", " rest"}[part])
			}
		}
		list[len(list)-1].Label = charts.SeriesLabel{
			Show:           charts.Ptr(true),
			ValueFormatter: func(float64) string { return b.Text },
			FontStyle:      charts.FontStyle{FontSize: fontSize, FontColor: sentinel(textInk)},
		}
	}
	if len(list) > 0 {
		// Without a value of 0 the library begins the axis of stacked bars below 0.
		zero := slices.Repeat([]float64{charts.GetNullValue()}, len(rows))
		zero[0] = 0
		list, inks = append(list, charts.BarSeries{Values: zero}), append(inks, "none")
	}
	height := max(len(rows), 1)*barHeight + axisFoot
	p := paper(barsWidth, height, inks)
	if len(list) > 0 {
		opt := charts.NewBarChartOptionWithSeries(list)
		opt.Theme = theme(inks, 0)
		opt.Padding = charts.NewBox(2, 2, textRoom, 0)
		opt.Horizontal, opt.StackSeries = true, charts.Ptr(true)
		opt.Legend.Show = charts.Ptr(false)
		opt.BarSize = 0.72
		font := charts.FontStyle{FontSize: fontSize}
		opt.CategoryAxis = charts.CategoryAxisOption{Labels: labels, LabelFontStyle: font, LabelCount: len(labels)}
		ticks := Ticks(top)
		opt.ValueAxis = []charts.ValueAxisOption{{
			Min: charts.Ptr(0.0), Max: charts.Ptr(ticks[len(ticks)-1]), LabelCount: len(ticks),
			LabelFontStyle: font,
			ValueFormatter: func(v float64) string {
				if v > ticks[len(ticks)-1]*0.999 { // the library moves the last one onto the one before
					return ""
				}
				return format(v)
			},
		}}
		if err := p.BarChart(opt); err != nil {
			return "", fmt.Errorf("draw bars: %w", err)
		}
	}
	return finish(p, inks, `class="bars" role="img" aria-label="`+template.HTMLEscapeString(title)+`"`)
}
