package tui

import (
	"math"
	"strconv"
	"strings"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
)

// look is how things look on the terminal. Colours are the first eight, which follow its theme.
type look struct {
	ascii                           bool
	bar, head, dim, bad, warn, good lipgloss.Style
}

func newLook(o Options) look {
	s := lipgloss.NewStyle
	return look{
		ascii: o.ASCII,
		bar:   s().Reverse(true),
		head:  s().Bold(true),
		dim:   s().Faint(!o.ASCII),
		bad:   s().Bold(true).Foreground(lipgloss.Red),
		warn:  s().Foreground(lipgloss.Yellow),
		good:  s().Foreground(lipgloss.Cyan),
	}
}

// The parts by which a container is slowed from which on that looks bad, or is worth a look.
const (
	slowedBad  = 0.20
	slowedWarn = 0.05
)

// slowed is the style of a container that is slowed by a part.
func (l look) slowed(part float64) lipgloss.Style {
	switch {
	case part >= slowedBad:
		return l.bad
	case part >= slowedWarn:
		return l.warn
	}
	return lipgloss.NewStyle()
}

// text makes a text that is safe to print one that the terminal can show.
func (l look) text(s string) string {
	if !l.ascii {
		return s
	}
	s = strings.NewReplacer("…", "~", "←", "<-", "→", "->", "↑↓", "Up Down", "↑", "Up", "↓", "Down").Replace(s)
	var out strings.Builder
	for _, r := range s {
		if r < 0x80 {
			out.WriteRune(r)
		} else {
			q := strconv.QuoteRuneToASCII(r)
			out.WriteString(q[1 : len(q)-1])
		}
	}
	return out.String()
}

// cut shortens a line, which may have styles, to n cells.
func (l look) cut(s string, n int) string {
	end := "…"
	if l.ascii {
		end = "~"
	}
	return ansi.Truncate(s, max(n, 0), end)
}

// cell makes a text n cells wide.
func (l look) cell(s string, n int, right bool) string {
	s = l.cut(l.text(s), n)
	fill := strings.Repeat(" ", max(0, n-ansi.StringWidth(s)))
	if right {
		return fill + s
	}
	return s + fill
}

// line fills a line of n cells with a text at its start and one at its end. The one at the end is
// left out where there is no room.
func (l look) line(left, right string, n int) string {
	left, right = l.text(left), l.text(right)
	gap := n - ansi.StringWidth(left) - ansi.StringWidth(right)
	if gap < 2 {
		return l.cell(left, n, false)
	}
	return left + strings.Repeat(" ", gap) + right
}

// wrap breaks a line that is safe to print; what is left of it stands further to the right.
func (l look) wrap(s string, n int) []string {
	s = l.text(s)
	if ansi.StringWidth(s) <= n {
		return []string{s}
	}
	indent := strings.Repeat(" ", min(len(s)-len(strings.TrimLeft(s, " "))+4, n/2))
	lines := strings.Split(ansi.Wrap(s, max(n-len(indent), 1), ""), "\n")
	for i := range lines[1:] {
		lines[i+1] = indent + strings.TrimLeft(lines[i+1], " ")
	}
	return lines
}

// spark draws values as a plot of one line, from 0 to high; NaN is a blank.
func (l look) spark(values []float64, high float64) string {
	levels := []rune("▁▂▃▄▅▆▇█")
	if l.ascii {
		levels = []rune("_.:-=+*#")
	}
	var out strings.Builder
	for _, v := range values {
		switch {
		case math.IsNaN(v):
			out.WriteByte(' ')
		case high <= 0:
			out.WriteRune(levels[0])
		default:
			i := int(math.Round(v / high * float64(len(levels)-1)))
			if v > 0 {
				i = max(i, 1)
			}
			out.WriteRune(levels[max(0, min(i, len(levels)-1))])
		}
	}
	return out.String()
}
