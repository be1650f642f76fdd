package latency

import (
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
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
			title := columns.Name(c.Container, c.Name) + ", " + c.Direction
			if v.protocols {
				title += ", " + protocol
			}
			fmt.Fprintf(w, "%s: %s packets, %s covered\n", title, view.Scale(float64(t.Coverage.Seen)), covered(t.Coverage))
			stageTable(w, c.Direction, t)
		})
		meanwhile(w, c.Meanwhile)
	}
	v.notes(w)
}

// stageTable prints the stages of one direction, and their sums below.
func stageTable(w io.Writer, direction string, t api.LatencyTimes) {
	type row struct {
		api.LatencyStage
		bar string
	}
	var rows []row
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
		rows = append(rows, row{s, bar(from/all, to/all)})
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
		rows = append(rows, row{*t.Added, bar(added[0]/all, added[1]/all)})
	}
	if t.Stack != nil {
		rows = append(rows, row{*t.Stack, bar(0, all/all)}) // NaN, and so no bar, if no stage took any time
	}
	if t.Local != nil {
		rows = append(rows, row{*t.Local, ""})
	}
	if len(rows) == 0 {
		return
	}
	columns.Print(w, rows,
		columns.Plain("STAGE", func(r row) string { return r.Stage }),
		columns.Plain("WHERE THE MEAN GOES", func(r row) string { return r.bar }),
		columns.Number("MEAN", func(r row) string { return fine(r.Mean) }),
		columns.Number("P50", func(r row) string { return fine(r.P50) }),
		columns.Number("P90", func(r row) string { return fine(r.P90) }),
		columns.Number("P99", func(r row) string { return fine(r.P99) }),
		columns.Number("MAX", func(r row) string { return fine(r.Max) }),
	)
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
		text += fmt.Sprintf(", %.1f %% for those of %s", 100*n.Share, cli.Cut(columns.Name(n.Container, n.Name), 30))
	}
	for _, line := range cli.Fold(text, cli.Across(w, columns.Line)) {
		fmt.Fprintln(w, line)
	}
}
