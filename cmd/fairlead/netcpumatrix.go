package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// matrix prints victims as rows and culprits as columns.
func (v netcpuView) matrix(w io.Writer) {
	cells := make(map[string]map[api.ID]float64) // by victim and culprit
	sum := make(map[api.ID]float64)
	order := make(map[string]float64)
	for _, t := range v.n.Matrix {
		if !v.visible(t.Seconds) {
			continue
		}
		name := v.party(t)
		if cells[name] == nil {
			cells[name] = make(map[api.ID]float64)
		}
		cells[name][t.Culprit] += t.Seconds
		sum[t.Culprit] += t.Seconds
		order[name] = order[name] + t.Seconds
		if t.Victim == 0 || t.Kind == api.VictimPeer { // system time and peers, which are no loss, go below the containers
			order[name] = -float64(slices.Index([]string{api.VictimTask, api.VictimKsoftirqd, api.VictimNAPI, api.VictimPeer, api.VictimIdle}, t.Kind) + 1)
		}
	}
	if len(cells) == 0 {
		fmt.Fprintf(w, "In %s no packets took the time of anybody else.\n", span(v.n.Taken.Sub(v.n.Since)))
		v.throttled(w)
		return
	}
	victims := slices.SortedFunc(maps.Keys(cells), func(x, y string) int { return cmp.Or(cmp.Compare(order[y], order[x]), cmp.Compare(x, y)) })
	culprits := slices.SortedFunc(maps.Keys(sum), func(x, y api.ID) int { return cmp.Or(cmp.Compare(sum[y], sum[x]), cmp.Compare(x, y)) })
	shown := v.fit(victims, culprits, cli.Across(w, screen))

	columns := []column{{"VICTIM \\ CULPRIT", 28}}
	for _, id := range shown {
		columns = append(columns, column{cli.Cut(v.names[id], v.most()), 0})
	}
	rest := culprits[len(shown):]
	if len(rest) > 0 {
		columns = append(columns, column{fmt.Sprintf("%d OTHERS", len(rest)), 0})
	}
	columns = append(columns, column{"ALL", 0})
	var rows [][]string
	for _, name := range victims {
		row := []string{name}
		all, others := 0.0, 0.0
		for i, id := range culprits {
			all += cells[name][id]
			switch x, ok := cells[name][id]; {
			case i >= len(shown):
				others += x
			case ok:
				row = append(row, v.amount(x))
			default:
				row = append(row, "-")
			}
		}
		if len(rest) > 0 {
			if v.visible(others) {
				row = append(row, v.amount(others))
			} else {
				row = append(row, "-")
			}
		}
		rows = append(rows, append(row, v.amount(all)))
	}
	if v.flags.wide {
		columns[0].max = 0
	}
	fmt.Fprintln(w, v.unit())
	right(columns, rows, 1, len(columns)-1)
	table(w, columns, rows)
	v.throttled(w)
}

// most is the maximum width of a culprit's name; 0 is no limit.
func (v netcpuView) most() int {
	if v.flags.wide {
		return 0
	}
	return 16
}

// fit returns the culprits with columns that fit the screen, the largest first.
func (v netcpuView) fit(victims []string, culprits []api.ID, screen int) []api.ID {
	if v.flags.wide {
		return culprits
	}
	const number = 7 // "12345.6"
	left := screen - 2 - number - 2 - number - 6
	widest := utf8.RuneCountInString("VICTIM \\ CULPRIT")
	for _, name := range victims {
		widest = max(widest, min(utf8.RuneCountInString(name), 28))
	}
	left -= widest
	for i, id := range culprits {
		left -= 2 + max(number, utf8.RuneCountInString(cli.Cut(v.names[id], v.most())))
		if left < 0 {
			return culprits[:i]
		}
	}
	return culprits
}

// throttled prints the containers that their own quota throttled, which are not in the matrix.
func (v netcpuView) throttled(w io.Writer) {
	first := true
	for _, a := range v.n.Accounts {
		if !v.visible(a.Throttled) {
			continue
		}
		if first {
			fmt.Fprintln(w)
			first = false
		}
		fmt.Fprintf(w, "Held back by its own quota, not by others: %s %s%s\n", cli.Cut(v.names[a.Container], 40), v.amount(a.Throttled), v.of())
	}
}
