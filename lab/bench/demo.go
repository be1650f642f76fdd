package bench

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/report"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// Screen is the output of the demo.
type Screen struct {
	io.Writer
	Colour bool // ANSI colours
}

// The length of the demo. With the time for switches it ends within half a minute. The build takes most
// of the time of `make demo` in a fresh clone.
const (
	demoRounds = 3
	demoIdle   = time.Second
	demoTake   = 3 * time.Second
	demoWarm   = 2 * time.Second
)

const demoIntro = `What a neighbour's packets cost, and what fairlead makes of it

Two sandboxes share one CPU, half each: a victim that computes, and a receiver.
A sender floods the receiver: NIC, bridge, veth. The quotas hold all the time,
and yet the victim pays for the receiver's packets, until fairlead protects it.

`

// Demo runs a short form of the netcpu experiment: one rig and a flood, without and with protection
// in turns. It takes half a minute, and has the requirements of [NetCPU].
func Demo(ctx context.Context, out Screen, version string) error {
	return demo(ctx, out, version, demoRounds, demoWarm, demoIdle, demoTake)
}

func demo(ctx context.Context, out Screen, version string, rounds int, warm, idle, take time.Duration) error {
	fmt.Fprint(out, demoIntro)
	e := &experiment{report: &report.Report{Bench: "demo", Env: environment(version, true), Rounds: rounds}, mode: "isolate", settle: warm}
	s := &session{bed: bed{experiment: e}, setup: setup{cfg: rig.Config{Path: rig.NIC}}}
	var full float64 // of the bars: the first idle victim
	var alone sample // of the round
	show := func(ctx context.Context, name, colour string, d demand, on bool) (m sample, err error) {
		fmt.Fprintf(out, "[%2d/%d] %-16s ", e.done, e.total, name)
		if m, err = s.measure(ctx, d, on); err != nil {
			fmt.Fprintln(out)
			return m, err
		}
		if d.rate == 0 {
			full = max(full, m.work)
		}
		fmt.Fprintf(out, "victim %-8s %s\n", report.Format(m.work, "1/s"), out.bar(m.work/full, colour))
		return m, nil
	}
	idles := func(ctx context.Context, _ arm) (_ []figure, err error) {
		e.take = idle
		alone, err = show(ctx, "nobody sends", barColours[0], demand{}, false)
		return []figure{{Work, "1/s", alone.work}}, err
	}
	floods := func(ctx context.Context, a arm) ([]figure, error) {
		e.take = take
		name := map[arm]string{armOff: "flood", armOn: "flood, fairlead"}[a]
		m, err := show(ctx, name, map[arm]string{armOff: barColours[1], armOn: barColours[2]}[a], demand{traffic: rig.Traffic{Kind: rig.UDP}, rate: load.Flood}, a == armOn)
		return append(m.figures, figure{Penalty, "1", alone.work / m.work}, figure{Work, "1/s", m.work}), err
	}
	cases := []armed{{name: "idle", arms: []arm{armOff}, measure: idles}, {name: "flood", arms: offOn(), measure: floods}}
	r, err := e.run(ctx, []plan{{name: "flood", rigged: s, series: []series{{inOrder: true, cases: cases}}}})
	if err == nil {
		out.summary(r)
	}
	return err
}

var barColours = [3]string{"32", "31", "36"} // green, red, cyan

// bar draws a share, 0 to 1, in eighths of 24 columns.
func (s Screen) bar(share float64, colour string) string {
	const width = 24
	eighths := int(min(max(share, 0), 1)*width*8 + 0.5)
	full, part := eighths/8, eighths%8
	text := strings.Repeat("█", full)
	if part > 0 {
		text += string([]rune("▏▎▍▌▋▊▉")[part-1])
	}
	return s.paint(text, colour)
}

func (s Screen) paint(text, colour string) string {
	if !s.Colour || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// summary prints the medians of all rounds, and the result in words.
func (s Screen) summary(r *report.Report) {
	idle, _ := r.Find("idle", Work)
	penalty, _ := r.Find("flood", Penalty)
	fmt.Fprintf(s, "\n%-18s %10s %9s %16s %12s\n", "Median of rounds", "victim", "slower", "receiver gets", "of sent")
	fmt.Fprintf(s, "%-18s %10s %9s %16s %12s\n", "nobody sends", report.Format(report.Median(idle.Off), "1/s"), "1.00", "-", "-")
	row := func(name, colour string, of func(report.Case) []float64) {
		line := fmt.Sprintf("%-18s", name)
		for _, m := range []struct {
			metric, unit string
			width        int
		}{{Work, "1/s", 10}, {Penalty, "1", 9}, {Received, "1/s", 16}, {Sent, "1/s", 12}} {
			c, _ := r.Find("flood", m.metric)
			line += fmt.Sprintf(" %*s", m.width, report.Format(report.Median(of(c)), m.unit))
		}
		fmt.Fprintln(s, s.paint(line, colour))
	}
	row("flood", barColours[1], func(c report.Case) []float64 { return c.Off })
	row("flood, fairlead", barColours[2], func(c report.Case) []float64 { return c.On })
	for _, n := range r.Env.Notes {
		fmt.Fprintf(s, "\nNote: %s.\n", n)
	}
	headline := fmt.Sprintf("Your victim ran %.2f times slower beside the flood; with fairlead %.2f times.", report.Median(penalty.Off), report.Median(penalty.On))
	fmt.Fprintf(s, "\n%s\n", s.paint(headline, "1"))
}
