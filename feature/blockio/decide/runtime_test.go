package decide

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestDivideRuntime(t *testing.T) {
	const ms = time.Millisecond
	of := func(ran ...time.Duration) (all []Thread) {
		for i, r := range ran {
			all = append(all, Thread{TID: i + 1, Ran: r})
		}
		return all
	}
	for _, c := range []struct {
		what   string
		budget time.Duration
		all    []Thread
		want   []time.Duration // by their running time
	}{
		{"none", 100 * ms, nil, nil},
		{"one, on one CPU at a time", 100 * ms, of(0), []time.Duration{100 * ms}},
		{"as many as CPUs", 100 * ms, of(0, 0), []time.Duration{100 * ms, 100 * ms}},
		{"one that works of many", 100 * ms, of(0, 90*ms, 0, 0, 0), []time.Duration{100 * ms, 25 * ms, 25 * ms, 25 * ms, 25 * ms}},
		{"all work", 100 * ms, of(90*ms, 90*ms, 90*ms, 90*ms), []time.Duration{50 * ms, 50 * ms, 50 * ms, 50 * ms}},
		{"has nearly as much", 100 * ms, []Thread{{Has: 90 * ms}}, []time.Duration{90 * ms}},
		{"has more than all", 100 * ms, []Thread{{Has: 200 * ms}}, []time.Duration{100 * ms}},
		{"too little for all", ms, of(slices.Repeat([]time.Duration{ms}, 50)...), slices.Repeat([]time.Duration{leastShare}, 20)},
		{"10,000 threads", 500 * ms, of(make([]time.Duration, 10_000)...), slices.Repeat([]time.Duration{15625 * time.Microsecond}, MaxDeadlines)},
	} {
		var got []time.Duration
		for _, s := range DivideRuntime(c.budget, 2, c.all) {
			got = append(got, s.Gets)
		}
		testkit.Same(t, c.what, c.want, got)
	}
}

func TestProfile(t *testing.T) {
	p := Profile{{Budget: 0.1, ReadIOPS: 1000, WriteIOPS: 500}, {Budget: 0.2, ReadIOPS: 900, WriteIOPS: 1000}, {Budget: 0.4, ReadIOPS: 3000, WriteIOPS: 1000}}
	for _, c := range []struct {
		want   api.BlockIOFigures
		budget time.Duration
		says   string
	}{
		{api.BlockIOFigures{ReadIOPS: 1000}, 100 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadIOPS: 500}, 50 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadIOPS: 2000}, 300 * time.Millisecond, ""}, // the result for 200 ms is less than that for 100 ms
		{api.BlockIOFigures{ReadIOPS: 500, WriteIOPS: 750}, 200 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadBytes: 500 * largeRequest}, 50 * time.Millisecond, ""},
		{api.BlockIOFigures{ReadIOPS: 3001}, 0, "3000 reads"},
		{api.BlockIOFigures{WriteIOPS: 1001}, 0, "1000 writes"},
		{api.BlockIOFigures{ReadIOPS: 3000, WriteIOPS: 1000}, 0, "together"},
	} {
		got, err := p.Needs(c.want)
		if got != c.budget || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, %v; want %v %s", c.want, got, err, c.budget, c.says)
		}
	}
	var last time.Duration
	for n := uint64(1); n <= 3000; n++ {
		got, err := p.Needs(api.BlockIOFigures{ReadIOPS: n})
		if err != nil || got < last {
			t.Fatalf("%d reads need %v, one less %v; %v", n, got, last, err)
		}
		last = got
	}
	for _, bad := range []Profile{{{Budget: 0}}, {{Budget: 0.6}}, {{Budget: 0.2}, {Budget: 0.1}}, {{Budget: 0.1, ReadIOPS: maxIOPS + 1}}, make(Profile, maxPoints+1)} {
		if bad.check() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}
