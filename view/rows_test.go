package view

import (
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/test/viewtest"
)

func labels(rows []Row) (out []string) {
	for _, r := range rows {
		out = append(out, r.Label())
	}
	return out
}

func TestRows(t *testing.T) {
	o := api.Overview{Rows: []api.OverviewRow{
		{Container: 1, Name: "db", Slowed: 0.2, CPU: 0.5, By: []api.Slowdown{{Cause: "packets", Slowed: 0.2, Culprit: 2, Name: "Flood"}}},
		{Container: 3, Name: "shop/cart/a", Namespace: "shop", Pod: "cart", Slowed: 0.1, CPU: 0.1, IOPS: 10, InForce: []string{"traffic"}},
		{Container: 2, Name: "Flood", CPU: 1},
		{Container: 4, Name: "shop/cart/b", Namespace: "shop", Pod: "cart", CPU: 0.7, IOPS: 5, InForce: []string{"traffic", "netcpu"}},
		{Container: 5, Name: "web", CPU: 0.2},
	}}
	for _, tt := range []struct {
		by   Order
		want []string
	}{
		{Order{}, []string{"db", "shop/cart/a", "Flood", "shop/cart/b", "web"}},
		{Order{Reverse: true}, []string{"Flood", "shop/cart/b", "web", "shop/cart/a", "db"}},
		{Order{Sort: "cpu"}, []string{"Flood", "shop/cart/b", "db", "web", "shop/cart/a"}},
		{Order{Sort: "name"}, []string{"Flood", "db", "shop/cart/a", "shop/cart/b", "web"}},
		{Order{Filter: "FLOOD"}, []string{"db", "Flood"}}, // also whom it slows
		{Order{Filter: "cart"}, []string{"shop/cart/a", "shop/cart/b"}},
		{Order{Filter: "nothing"}, nil},
		{Order{Tree: true}, []string{"db", "shop/cart", "  a", "  b", "Flood", "web"}},
		{Order{Tree: true, Sort: "cpu"}, []string{"Flood", "shop/cart", "  b", "  a", "db", "web"}},
	} {
		if got := labels(Rows(o, tt.by)); !slices.Equal(got, tt.want) {
			t.Errorf("%+v: %q, want %q", tt.by, got, tt.want)
		}
	}
	pod := Rows(o, Order{Tree: true})[1]
	if pod.Members != 2 || pod.Slowed != 0.1 || pod.IOPS != 15 || len(pod.InForce) != 2 {
		t.Errorf("%+v", pod)
	}
}

// No cell of any column carries what a terminal or a reader could take for more than text.
func TestCells(t *testing.T) {
	host := viewtest.Host{Containers: 6, Every: Every}
	o := host.Frame(1).After(host.Frame(0))
	o.Rows[0].Namespace, o.Rows[0].Pod = viewtest.Hostile, viewtest.Hostile
	for _, tree := range []bool{false, true} {
		for _, r := range Rows(o, Order{Tree: tree}) {
			for _, c := range Columns() {
				cell := c.Cell(r)
				if cell == "" || strings.ContainsFunc(cell, func(r rune) bool { return !unicode.IsPrint(r) }) {
					t.Errorf("%s of %q: %q", c.Head, r.Name, cell)
				}
			}
			if text := Reasons(r.By); strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("reasons of %q: %q", r.Name, text)
			}
		}
	}
	for id := range api.ID(7) {
		for _, a := range Actions(host.Frame(1), id) {
			if strings.ContainsFunc(a.Text, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("action of %d: %q", id, a.Text)
			}
		}
	}
}

func TestBlamed(t *testing.T) {
	for _, tt := range []struct {
		by   []api.Slowdown
		want string
	}{
		{nil, "-"},
		{[]api.Slowdown{{Cause: "packets", Culprit: 2, Name: "flood"}}, "flood: packets"},
		{[]api.Slowdown{{Cause: "packets"}, {Cause: "cpu"}, {Cause: "disk"}}, "(host): packets +2"},
		{[]api.Slowdown{{Cause: "uplink"}}, "(others): uplink"},
		{[]api.Slowdown{{Cause: "disk", Culprit: 2}}, "(unnamed): disk"},
		{[]api.Slowdown{{Cause: "cpu", Culprit: 2, Name: "(host)"}}, `"(host)": cpu`},
	} {
		if got := Blame(tt.by); got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.by, got, tt.want)
		}
	}
}

func TestUnits(t *testing.T) {
	for got, want := range map[string]string{
		of(0, 0): "-", of(148e6, 0): "148M", of(148e6, 200e6): "148M/200M", of(0, 5e3): "0/5k", of(4210, 1.25e10): "4.21k/12.5G", of(999.9, 0): "1k",
		Percent(0): "0 %", Percent(0.001): "<1 %", Percent(0.234): "23 %", cpu(0.004): "0.4%", cpu(0.0996): "10%", cpu(12.5): "1250%",
		Brief(0): "<1us", Brief(0.00125): "1.25ms", Brief(0.9996e-3): "1ms", Brief(0.9996): "1s", Brief(999.6): "1000s", Bits(1.5e9): "1.50Gbit",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestScale(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 999: "999", 999.6: "1.00k", 1234: "1.23k", 99_960: "100k", 123_456: "123k", 999_600: "1.00M", 1e9: "1.00G", 9.99e12: "9.99T"} {
		if got := Scale(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}
