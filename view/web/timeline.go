package web

import (
	"encoding/json"
	"html/template"
	"math"
	"slices"
	"time"

	"github.com/fairlead-project/fairlead/view"
	"github.com/fairlead-project/fairlead/view/plot"
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
	lines []plot.Line
}

// legend is the key of one line.
type legend struct {
	plot.Line
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
	Inks  []plot.Ink `json:"inks"`
	Texts [][]string `json:"texts"` // for each line, a text for each part
}

// done draws what was added.
func (t *timeline) done() *timeline {
	top := 0.0
	d := data{From: t.look.to.Add(-t.look.span).UnixMilli(), To: t.look.to.UnixMilli()}
	for _, l := range t.lines {
		key := legend{Line: l, Last: "-", Most: "-"}
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
	ticks := plot.Ticks(top)
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
	t.SVG = plot.Lines(t.lines, ticks)
	text, _ := json.Marshal(d) // never fails for numbers and strings
	t.Data = string(text)
	return t
}
