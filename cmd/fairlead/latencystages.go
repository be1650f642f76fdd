package main

import (
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// barWidth is the width of the bars, in characters.
const barWidth = 22

// waterfall prints, for each direction of each container, where the time of its packets
// goes: a bar for the mean of each stage, in the order in which packets pass the stages.
func (v latencyView) waterfall(w io.Writer) {
	if v.empty(w) {
		return
	}
	first := true
	for _, c := range v.Containers {
		v.each(c, func(protocol string, t api.LatencyTimes) {
			if !first {
				fmt.Fprintln(w)
			}
			first = false
			title := latencyName(c) + ", " + c.Direction
			if v.protocols {
				title += ", " + protocol
			}
			fmt.Fprintf(w, "%s: %s packets, %s covered\n", title, scale(float64(t.Coverage.Seen)), covered(t.Coverage))
			stageTable(w, c.Direction, t)
		})
		meanwhile(w, c.Meanwhile)
	}
	v.notes(w)
}

// stageTable prints the stages of one direction, and their sums below.
func stageTable(w io.Writer, direction string, t api.LatencyTimes) {
	columns := []column{{"STAGE", 0}, {"WHERE THE MEAN GOES", 0}, {"MEAN", 0}, {"P50", 0}, {"P90", 0}, {"P99", 0}, {"MAX", 0}}
	var rows [][]string
	row := func(s api.LatencyStage, bar string) {
		rows = append(rows, []string{s.Stage, bar, fine(s.Mean), fine(s.P50), fine(s.P90), fine(s.P99), fine(s.Max)})
	}
	var most uint64 // most packets in a stage: not all packets pass every stage
	for _, s := range t.Stages {
		most = max(most, s.Packets)
	}
	part := func(s api.LatencyStage) float64 { return s.Mean * float64(s.Packets) / float64(max(most, 1)) }
	all := 0.0
	for _, s := range t.Stages {
		all += part(s)
	}
	from, added := 0.0, [2]float64{0, 0} // start and end of the stages in the sum "added"
	for i, s := range t.Stages {
		to := from + part(s)
		row(s, bar(from/all, to/all))
		switch {
		case direction == "egress" && s.Stage == "device":
			added = [2]float64{to, to}
		case direction == "ingress" && s.Stage == "socket":
		case i == 0:
			added = [2]float64{0, to}
		default:
			added[1] = to
		}
		from = to
	}
	if t.Added != nil {
		row(*t.Added, bar(added[0]/all, added[1]/all))
	}
	if t.Stack != nil {
		row(*t.Stack, bar(0, all/all)) // NaN, and so no bar, if no stage took any time
	}
	if t.Local != nil {
		row(*t.Local, "")
	}
	if len(rows) == 0 {
		return
	}
	right(columns, rows, 2, len(columns)-1)
	table(w, columns, rows)
}

// bar draws a bar between two fractions of the width. Any time above 0 has a mark.
func bar(from, to float64) string {
	if !(to > from) {
		return ""
	}
	at := min(int(math.Round(from*barWidth)), barWidth-1)
	return strings.Repeat(" ", at) + strings.Repeat("#", max(1, int(math.Round(to*barWidth))-at))
}

// meanwhile prints the packet work of a container's CPUs.
func meanwhile(w io.Writer, m *api.LatencyMeanwhile) {
	if m == nil {
		return
	}
	const shown = 5
	text := fmt.Sprintf("meanwhile CPU %s worked %.1f %% of the time for its packets", strings.Trim(fmt.Sprint(m.CPUs), "[]"), 100*m.Own)
	for i, n := range m.By {
		if i == shown || n.Share < 0.0005 {
			break
		}
		name := cli.Show(n.Name)
		if n.Name == "" {
			name = "id " + n.Container.String()
		}
		text += fmt.Sprintf(", %.1f %% for those of %s", 100*n.Share, cli.Cut(name, 30))
	}
	for _, line := range cli.Fold(text, cli.Across(w, latencyScreen)) {
		fmt.Fprintln(w, line)
	}
}
