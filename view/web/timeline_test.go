package web

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// elements reads a diagram as XML, and returns its elements by name with their class, and its texts.
func elements(t interface{ Fatalf(string, ...any) }, svg string) (classes map[string][]string, texts []string) {
	classes = make(map[string][]string)
	dec := xml.NewDecoder(strings.NewReader(svg))
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return classes, texts
		}
		if err != nil {
			t.Fatalf("%v in %s", err, svg)
		}
		switch tok := tok.(type) {
		case xml.StartElement:
			for _, a := range tok.Attr {
				switch a.Name.Local {
				case "class":
					classes[tok.Name.Local] = append(classes[tok.Name.Local], a.Value)
				case "style":
					t.Fatalf("a style in %s", svg)
				}
				if strings.Contains(a.Value, "NaN") || strings.Contains(a.Value, "Inf") {
					t.Fatalf("%s=%q in %s", a.Name.Local, a.Value, svg)
				}
			}
		case xml.CharData:
			if s := strings.TrimSpace(string(tok)); s != "" {
				texts = append(texts, s)
			}
		}
	}
}

func TestDraw(t *testing.T) {
	svg := draw([]curve{
		{Name: "a", Ink: "main", Values: []float64{1, 2, math.NaN(), 3, 2}},
		{Name: "b", Ink: "bound", Values: []float64{3, 3, 3, 3, 3}, Dashed: true},
	}, []float64{0, 2, 4})
	classes, texts := elements(t, string(svg))
	want := []string{"stroke ink-grid", "stroke ink-grid", "stroke ink-grid", "stroke ink-main", "stroke ink-main", "stroke ink-bound dashed"}
	if !slices.Equal(classes["path"], want) || len(texts) > 0 {
		t.Errorf("paths %q, texts %q, want %q", classes["path"], texts, want)
	}
	for _, point := range []string{"M 0 150 L 250 100", "M 750 50 L 1000 100", "M 0 50 L 250 50 L 500 50"} {
		if !strings.Contains(string(svg), point) {
			t.Errorf("no %q in %s", point, svg)
		}
	}
}

// TestLinesOfAnything draws any values: all that it can draw are elements with the classes of the style
// sheet.
func TestLinesOfAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 50).Draw(t, "values")
		var lines []curve
		top := 0.0
		for i := range rapid.IntRange(0, 6).Draw(t, "lines") {
			l := curve{Name: "<b>", Ink: fmt.Sprintf("s%d", i+1)}
			for range n {
				v := rapid.OneOf(rapid.Float64Range(0, 1e12), rapid.SampledFrom([]float64{0, 1, math.NaN(), math.Inf(1)})).Draw(t, "v")
				if l.Values = append(l.Values, v); v > top && !math.IsInf(v, 0) {
					top = v
				}
			}
			lines = append(lines, l)
		}
		svg := draw(lines, ticksTo(top))
		classes, _ := elements(t, string(svg))
		for _, class := range slices.Concat(classes["path"], classes["circle"]) {
			if !regexp.MustCompile(`^(stroke|fill) ink-(grid|s\d)$`).MatchString(class) {
				t.Fatalf("class %q in %s", class, svg)
			}
		}
	})
}

func TestTicks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		top := rapid.Float64Range(1e-9, 1e12).Draw(t, "top")
		ticks := ticksTo(top)
		last := ticks[len(ticks)-1]
		if len(ticks) < 2 || len(ticks) > 6 || ticks[0] != 0 || last < top*(1-1e-9) || last > top*2.6 {
			t.Fatalf("ticksTo(%v) = %v", top, ticks)
		}
	})
	for _, bad := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		if got := ticksTo(bad); !slices.Equal(got, []float64{0, 1}) {
			t.Errorf("ticksTo(%v) = %v", bad, got)
		}
	}
}

// TestInks holds that each ink that the package or its callers use has a colour in both schemes.
func TestInks(t *testing.T) {
	css := style(t)
	for _, ink := range []string{"grid", "text", "packets", "cpu", "uplink", "disk", "main", "second", "bound", "s1", "s2", "s3", "s4", "s5"} {
		if !strings.Contains(css, ".ink-"+ink+" {") {
			t.Errorf("style.css has no class .ink-%s", ink)
		}
	}
	for _, name := range regexp.MustCompile(`var\(--([a-z0-9]+)\)`).FindAllStringSubmatch(css, -1) {
		if n := strings.Count(css, "--"+name[1]+": "); n != 2 {
			t.Errorf("style.css has %d values of --%s, want one for light and one for dark", n, name[1])
		}
	}
}

func style(t *testing.T) string {
	css, err := files.ReadFile("style.css")
	must(t, err)
	return string(css)
}
