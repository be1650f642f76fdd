package report

import (
	"fmt"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// The plot's measures, in the units of its view box.
const (
	plotWidth  = 460.0
	plotHeight = 240.0
	marginLeft = 58.0
	marginTop  = 32.0 // room for two labels, one above the other
	marginFoot = 28.0 // room for a line below the axis
)

// What a bar's label takes, at most: the font of the page is 12 units high.
const (
	labelHeight = 13.0
	labelLetter = 7.0
	capWidth    = 8.0 // of the whisker's ends
)

// svg draws a plot: for each group two bars, off and on, as high as the median,
// with the value above and the 5 % to 95 % spread as a whisker with ends. A
// reader who points at a bar is told all three.
func (r *Report) svg(p Plot) template.HTML {
	var cases []Case
	var top float64
	for _, g := range p.Groups {
		c, _ := r.Find(g.Case, p.Metric)
		cases = append(cases, c)
		for _, values := range append(slices.Collect(maps.Values(c.Peers)), c.Off, c.On) {
			if _, high := Spread(values); high > top {
				top = high
			}
		}
	}
	ticks := axis(max(top, p.Ideal))
	top = ticks[len(ticks)-1]
	y := func(v float64) float64 {
		return marginTop + (plotHeight-marginTop-marginFoot)*(1-v/top)
	}
	unit := "1"
	for _, c := range cases {
		if c.Unit != "" {
			unit = c.Unit
		}
	}
	var b strings.Builder
	for _, t := range ticks {
		fmt.Fprintf(&b, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f" />`, marginLeft, plotWidth, y(t), y(t))
		fmt.Fprintf(&b, `<text class="axis" x="%g" y="%.1f" text-anchor="end">%s</text>`+"\n", marginLeft-8, y(t)+4, tick(t, unit))
	}
	step := (plotWidth - marginLeft) / float64(max(len(cases), 1))
	peers := r.peers()
	bars := 2 + len(peers)
	bar := math.Min(step*0.64/float64(bars), 44)
	// The values come last: a bar would cover that of the one before.
	var values strings.Builder
	var labels labels
	lines := 1 // below the axis
	for i, c := range cases {
		middle := marginLeft + step*(float64(i)+0.5)
		type series struct {
			name, class string
			x           float64
			values      []float64
		}
		place := func(n int) float64 { return middle + (bar+2)*(float64(n)-float64(bars)/2) + 1 }
		all := []series{{"off", "off", place(0), c.Off}, {"on", "on", place(1), c.On}}
		for n, p := range peers {
			all = append(all, series{p, fmt.Sprintf("peer%d", n), place(2 + n), c.Peers[p]})
		}
		for _, s := range all {
			m := Median(s.values)
			if math.IsNaN(m) {
				continue
			}
			low, high := Spread(s.values)
			centre := s.x + bar/2
			fmt.Fprintf(&b, `<g><title>%s, %s: %s %s</title>`, template.HTMLEscapeString(p.Groups[i].Label), template.HTMLEscapeString(s.name), Format(m, unit), spread(s.values, unit))
			fmt.Fprintf(&b, `<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f" rx="2" />`, s.class, s.x, y(m), bar, y(0)-y(m))
			half := math.Min(capWidth, bar) / 2
			fmt.Fprintf(&b, `<path class="whisker" d="M%.1f %.1fh%.1fm%.1f 0V%.1fm%.1f 0h%.1f" /></g>`+"\n", centre-half, y(high), 2*half, -half, y(low), -half, 2*half)
			text := tick(m, unit)
			centre = math.Min(centre, plotWidth-textWidth(text)/2)
			fmt.Fprintf(&values, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`+"\n", centre, labels.place(centre, y(high)-5, text), text)
		}
		below := wrap(p.Groups[i].Label, int(step/labelLetter))
		lines = max(lines, len(below))
		for n, line := range below {
			fmt.Fprintf(&b, `<text class="axis" x="%.1f" y="%g" text-anchor="middle">%s</text>`+"\n", middle, plotHeight-8+labelHeight*float64(n), template.HTMLEscapeString(line))
		}
	}
	if p.Ideal > 0 {
		fmt.Fprintf(&b, `<line class="ideal" x1="%g" x2="%g" y1="%.1f" y2="%.1f" />`+"\n", marginLeft, plotWidth, y(p.Ideal), y(p.Ideal))
	}
	highest := 0.0 // where labels stand in more rows than there is room for
	for _, l := range labels {
		highest = min(highest, l.y-labelHeight)
	}
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 %g %g %g" role="img" aria-label="%s">`+"\n", highest, plotWidth, plotHeight-highest+labelHeight*float64(lines-1),
		template.HTMLEscapeString(p.Title)) + b.String() + values.String() + "</svg>")
}

// wrap breaks a text at its blanks into lines of so many letters. A longer word has
// a line of its own.
func wrap(text string, letters int) (lines []string) {
	for _, word := range strings.Fields(text) {
		if n := len(lines) - 1; n >= 0 && utf8.RuneCountInString(lines[n])+1+utf8.RuneCountInString(word) <= letters {
			lines[n] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}

// textWidth is what a label takes, at most.
func textWidth(text string) float64 { return labelLetter * float64(utf8.RuneCountInString(text)) }

// labels are the texts on a plot so far.
type labels []label

type label struct{ left, right, y float64 }

// place gives the height at which a text does not cover those before: its own, or
// above them. Bars that are nearly equally high have labels in two rows.
func (ls *labels) place(centre, y float64, text string) float64 {
	half := textWidth(text) / 2
	l := label{centre - half, centre + half, y}
	for moved := true; moved; {
		moved = false
		for _, o := range *ls {
			if l.left < o.right && o.left < l.right && math.Abs(l.y-o.y) < labelHeight-0.01 {
				l.y, moved = o.y-labelHeight, true
			}
		}
	}
	*ls = append(*ls, l)
	return l.y
}

// tick is a value without the part of the unit that the title says.
func tick(v float64, unit string) string {
	s := Format(v, unit)
	s = strings.TrimSuffix(s, "/s")
	return strings.TrimSuffix(s, "bit")
}

// axis gives round values from 0 to at least top, three to six of them.
func axis(top float64) []float64 {
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
