package web

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"testing"
)

// colour is red, green and blue, 0 to 1.
type colour [3]float64

func parse(t *testing.T, hex string) (c colour) {
	t.Helper()
	for i := range c {
		v, err := strconv.ParseUint(hex[1+2*i:3+2*i], 16, 8)
		must(t, err)
		c[i] = float64(v) / 255
	}
	return c
}

// luminance is the relative luminance of WCAG 2.2.
func (c colour) luminance() float64 {
	var l float64
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		if v := c[i]; v <= 0.04045 {
			l += weight * v / 12.92
		} else {
			l += weight * math.Pow((v+0.055)/1.055, 2.4)
		}
	}
	return l
}

func contrast(a, b colour) float64 {
	x, y := a.luminance(), b.luminance()
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

// over mixes two colours as color-mix in srgb does.
func (c colour) over(under colour, part float64) (out colour) {
	for i := range out {
		out[i] = part*c[i] + (1-part)*under[i]
	}
	return out
}

// TestContrast computes from the style sheet what WCAG AA asks for, in both schemes: 4.5 for texts,
// 3 for lines, bars, borders of fields and the focus.
func TestContrast(t *testing.T) {
	css := style(t)
	root := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(css, -1)
	if len(root) != 2 {
		t.Fatalf("%d schemes", len(root))
	}
	mixes := regexp.MustCompile(`\.heat\.(h\d+), .*color-mix\(in srgb, var\(--heat\) (\d+)%, var\(--bg\)\)`).FindAllStringSubmatch(css, -1)
	if len(mixes) != 10 {
		t.Fatalf("%d steps of heat", len(mixes))
	}
	for i, scheme := range []string{"light", "dark"} {
		colours := make(map[string]colour)
		for _, m := range regexp.MustCompile(`--([a-z0-9]+): (#[0-9a-f]{6});`).FindAllStringSubmatch(root[i][1], -1) {
			colours[m[1]] = parse(t, m[2])
		}
		check := func(what string, a, b colour, least float64) {
			if got := contrast(a, b); got < least {
				t.Errorf("%s: %s has a contrast of %.2f, want %.1f", scheme, what, got, least)
			}
		}
		for _, under := range []string{"bg", "card", "line"} {
			for _, text := range []string{"fg", "soft", "link"} {
				if under != "line" || text == "fg" { // what is chosen is written in the colour fg
					check(text+" on "+under, colours[text], colours[under], 4.5)
				}
			}
		}
		for _, under := range []string{"bg", "card"} {
			for _, ink := range []string{"packets", "cpu", "uplink", "disk", "main", "second", "bound", "s1", "s2", "s3", "s4", "s5", "edge", "focus"} {
				check(ink+" on "+under, colours[ink], colours[under], 3)
			}
		}
		last := colours["bg"]
		for _, m := range mixes {
			part, err := strconv.ParseFloat(m[2], 64)
			must(t, err)
			heat := colours["heat"].over(colours["bg"], part/100)
			check(fmt.Sprintf("fg on %s", m[1]), colours["fg"], heat, 4.5)
			if heat == last {
				t.Errorf("%s: %s is not another colour than the step before", scheme, m[1])
			}
			last = heat
		}
	}
}
