package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/lab/report"
)

var update = flag.Bool("update", false, "write the tables of docs/measured.md anew from the records beside it")

const measuredPage = "../../docs/measured"

// TestMeasured checks that docs/measured.md has the tables of its records: docs/measured/NAME.json is
// what `fairlead-lab bench NAME --check -o json` printed, one run after another, and a later run
// replaces the cases of earlier ones.
func TestMeasured(t *testing.T) {
	page, err := os.ReadFile(measuredPage + ".md")
	must(t, err)
	var papers map[string]map[string]string
	data, err := os.ReadFile(measuredPage + "/papers.json")
	must(t, err)
	must(t, json.Unmarshal(data, &papers))
	want := string(page)
	for _, x := range Experiments() {
		records := readRecords(t, filepath.Join(measuredPage, x.Name+".json"))
		begin, end := "<!-- bench "+x.Name+" -->\n", "<!-- end -->\n"
		before, rest, found := strings.Cut(want, begin)
		_, after, closed := strings.Cut(rest, end)
		if len(records) > 0 && (!found || !closed) {
			t.Fatalf("docs/measured.md has no %q with an end", begin)
		}
		if len(records) > 0 {
			want = before + begin + tables(records, papers) + end + after
		}
	}
	if *update {
		must(t, os.WriteFile(measuredPage+".md", []byte(want), 0o644))
	} else if want != string(page) {
		t.Error("docs/measured.md differs from its records: go test -run TestMeasured ./lab/bench -update")
	}
}

// readRecords returns the runs of a file without the cases that later ones replace, and with -update
// writes them so. No file is none.
func readRecords(t *testing.T, file string) (runs []*report.Report) {
	t.Helper()
	data, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	must(t, err)
	for d := json.NewDecoder(bytes.NewReader(data)); ; {
		var r report.Report
		if err := d.Decode(&r); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, earlier := range runs {
			earlier.Cases = slices.DeleteFunc(earlier.Cases, func(c report.Case) bool { return has(r.Cases, c.Case) })
			earlier.Bars = slices.DeleteFunc(earlier.Bars, func(o report.Outcome) bool { return has(r.Cases, o.Case) })
		}
		runs = append(runs, &r)
	}
	runs = slices.DeleteFunc(runs, func(r *report.Report) bool { return len(r.Cases) == 0 })
	if *update {
		var out bytes.Buffer
		for _, r := range runs {
			must(t, json.NewEncoder(&out).Encode(r))
		}
		must(t, os.WriteFile(file, out.Bytes(), 0o644))
	}
	return runs
}

func has(cases []report.Case, name string) bool {
	return slices.ContainsFunc(cases, func(c report.Case) bool { return c.Case == name })
}

// tables writes a table for each run: a row for each figure that has a bar or that the paper has.
func tables(runs []*report.Report, papers map[string]map[string]string) string {
	var out strings.Builder
	for _, r := range runs {
		fmt.Fprintf(&out, "%s, %.10s.\n\n", r.Title(), r.Env.Started)
		columns := []string{"off", "on", "ratio"}
		for _, c := range r.Cases {
			for _, peer := range slices.Sorted(maps.Keys(c.Peers)) {
				if !slices.Contains(columns, peer) {
					columns = append(columns, peer)
				}
			}
		}
		fmt.Fprintf(&out, "case | figure | %s | paper\n---|---%s|---\n", strings.Join(columns, " | "), strings.Repeat("|---", len(columns)))
		last := ""
		for _, c := range r.Cases {
			cells, paper, barred := make([]string, len(columns)), papers[c.Case][c.Metric], false
			for i, of := range columns {
				cells[i] = cell(c, of)
				for _, o := range r.Bars {
					if o.Case == c.Case && o.Metric == c.Metric && o.Of == of {
						cells[i], barred = judged(o), true
					}
				}
			}
			if !barred && paper == "" {
				continue
			}
			name := ""
			if c.Case != last {
				name = "`" + c.Case + "`"
			}
			last = c.Case
			row := fmt.Sprintf("%s | %s | %s | %s", name, c.Metric, strings.Join(cells, " | "), paper)
			out.WriteString(strings.TrimRight(row, " |") + "\n")
		}
		out.WriteString("\n")
	}
	return out.String()
}

// cell is a median without a bar.
func cell(c report.Case, of string) string {
	values := map[string][]float64{"off": c.Off, "on": c.On}
	maps.Copy(values, c.Peers)
	if len(values[of]) == 0 {
		return ""
	}
	return report.Format(report.Median(values[of]), c.Unit)
}

// judged is a figure with its spread and its bar; what misses it is bold.
func judged(o report.Outcome) string {
	figure, bar := o.Figure(), o.Range()
	if o.Missed() {
		figure = "**" + figure + "**"
	}
	if o.Low != nil && o.High != nil {
		bar = "[" + bar + "]"
	}
	return strings.NewReplacer(" to ", "–", "≤ ", "≤", "≥ ", "≥").Replace(figure + " " + bar)
}
