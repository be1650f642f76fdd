package decide

import (
	"slices"
	"testing"
	"time"
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
		want   []time.Duration // by how much they ran
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
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}
}
