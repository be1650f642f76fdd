package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

// example has what makes trouble: markup in names, a missing half, zeros.
func example() *Report {
	r := &Report{
		Bench: "netcpu", Rounds: 3,
		Env: Env{
			Kernel: "6.18.44", CPU: "AMD <EPYC> & co", CPUs: 2, Arch: "amd64", Version: "dev",
			Started: "2026-01-02T03:04:05Z", Quick: true, Notes: []string{"no <protection> here"},
		},
	}
	for i, v := range []float64{2.4, 2.5, 3.5} {
		r.Add("hop 50/50 flood", "penalty", "1", "off", v)
		r.Add("hop 50/50 flood", "penalty", "1", "on", 1+float64(i)/100)
		r.Add("hop 50/50 flood", "goodput", "1/s", "off", 50000*v)
		r.Add("hop 50/50 flood", "goodput", "1/s", "on", 266000)
	}
	r.Add("<tcp>", "rate", "bit/s", "off", 3.41e9)
	r.Add("<tcp>", "p99", "s", "off", 0)
	r.Add("<tcp>", "p99", "s", "on", 15.3e-6)
	return r
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestGolden(t *testing.T) {
	var table bytes.Buffer
	r := example()
	data, err := json.MarshalIndent(r, "", "  ")
	if err := errors.Join(err, r.WriteTable(&table)); err != nil {
		t.Fatal(err)
	}
	golden(t, "table.txt", table.Bytes())
	golden(t, "report.json", append(data, '\n'))
}

func TestQuantile(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		q      float64
		want   float64
	}{
		{[]float64{3}, 0.95, 3},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 1, 3, 2}, 0.5, 2.5},
		{[]float64{0, 10}, 0.05, 0.5},
		{[]float64{0, 10}, 0, 0},
		{[]float64{0, 10}, 1, 10},
	} {
		if got := Quantile(tt.values, tt.q); math.Abs(got-tt.want) > 1e-12 {
			t.Errorf("Quantile(%v, %v) = %v, want %v", tt.values, tt.q, got, tt.want)
		}
	}
	if got := Median(nil); !math.IsNaN(got) {
		t.Errorf("Median(nil) = %v", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(-1e9, 1e9), 1, 40).Draw(t, "values")
		before := slices.Clone(values)
		low, high := Spread(values)
		m := Median(values)
		if low > m || m > high || low < slices.Min(values) || high > slices.Max(values) {
			t.Fatalf("low %v, median %v, high %v of %v", low, m, high, values)
		}
		if !slices.Equal(before, values) {
			t.Fatal("the values were changed")
		}
	})
}

func TestFormat(t *testing.T) {
	for _, tt := range []struct {
		value float64
		unit  string
		want  string
	}{
		{1.004, "1", "1.00"},
		{2.456, "1", "2.46"},
		{0, "1/s", "0/s"},
		{18207, "1/s", "18.2k/s"},
		{266400, "1/s", "266k/s"},
		{999960, "1/s", "1.00M/s"},
		{12, "1/s", "12.0/s"},
		{3.41e9, "bit/s", "3.41 Gbit/s"},
		{15.3e-6, "s", "15.3 µs"},
		{0.0002, "s", "200 µs"},
		{2.5e-10, "s", "0.25 ns"},
		{math.NaN(), "s", "-"},
		{7, "things", "7.00 things"},
	} {
		if got := Format(tt.value, tt.unit); got != tt.want {
			t.Errorf("Format(%v, %q) = %q, want %q", tt.value, tt.unit, got, tt.want)
		}
	}
}

func TestRatio(t *testing.T) {
	r := &Report{}
	r.Add("a", "m", "1", "on", 5)
	if got := r.Cases[0].Ratio; got != 0 {
		t.Errorf("ratio without off is %v", got)
	}
	r.Add("a", "m", "1", "off", 2)
	if got := r.Cases[0].Ratio; got != 2.5 {
		t.Errorf("ratio is %v, want 2.5", got)
	}
	if _, ok := r.Find("a", "other"); ok {
		t.Error("found a case that is not there")
	}
}

// TestPeers checks that each peer has a column, which is empty where a case has none.
func TestPeers(t *testing.T) {
	var r Report
	for _, of := range []string{"off", "on"} {
		r.Add("with", "m", "1", of, 1)
		r.Add("without", "m", "1", of, 2)
	}
	r.Add("with", "m", "1", "tc<", 7)
	r.Add("with", "m", "1", "tc<", 9)
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"TC<", "8.00  (7.10 to 8.90)"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in the table:\n%s", want, &table)
		}
	}
}
