package netcpu

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
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
		fmt.Fprintf(w, "In %s no packets took the time of anybody else.\n", v.over())
		v.throttled(w)
		return
	}
	victims := slices.SortedFunc(maps.Keys(cells), func(x, y string) int { return cmp.Or(cmp.Compare(order[y], order[x]), cmp.Compare(x, y)) })
	culprits := slices.SortedFunc(maps.Keys(sum), func(x, y api.ID) int { return cmp.Or(cmp.Compare(sum[y], sum[x]), cmp.Compare(x, y)) })
	shown := v.fit(victims, culprits, cli.Across(v.line(w), screen))

	table := []columns.Column[string]{columns.Plain("VICTIM \\ CULPRIT", func(name string) string { return name }).Cut(28)}
	for _, id := range shown {
		table = append(table, columns.Number(cli.Cut(v.names[id], v.most()), func(name string) string {
			x, ok := cells[name][id]
			return columns.If(ok, v.amount(x))
		}))
	}
	of := func(name string, list []api.ID) (all float64) {
		for _, id := range list {
			all += cells[name][id]
		}
		return all
	}
	rest := culprits[len(shown):]
	table = append(table,
		columns.Number(fmt.Sprintf("%d OTHERS", len(rest)), func(name string) string {
			others := of(name, rest)
			return columns.If(v.visible(others), v.amount(others))
		}).When(len(rest) > 0),
		columns.Number("ALL", func(name string) string { return v.amount(of(name, culprits)) }))
	fmt.Fprintln(w, v.unit())
	columns.Print(v.line(w), victims, table...)
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
