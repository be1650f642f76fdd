package view

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/viewtest"
)

// loaded is the history of the first frames of a host, 10 s apart.
func loaded(t *testing.T, h viewtest.Host, frames int) *History {
	t.Helper()
	h.Every = 10 * time.Second
	hist, err := Load(t.Context(), viewtest.Recording{Host: h, Count: frames}, time.Time{}, time.Time{})
	testkit.Must(t, err)
	return hist
}

func TestHistory(t *testing.T) {
	h := loaded(t, viewtest.Host{Containers: 6, Calm: 30}, 61)
	first, last := h.Bounds()
	if h.Len() != 60 || !first.Equal(viewtest.Start.Add(10*time.Second)) || !last.Equal(viewtest.Start.Add(10*time.Minute)) {
		t.Fatalf("%d overviews from %v to %v", h.Len(), first, last)
	}
	if _, ok := h.At(viewtest.Start); ok {
		t.Error("there is an overview before the first")
	}
	for _, tt := range []struct {
		at   time.Duration
		step int
		want time.Duration // 0: none
	}{
		{15 * time.Second, 0, 10 * time.Second},
		{20 * time.Second, 1, 30 * time.Second},
		{25 * time.Second, -1, 10 * time.Second},
		{10 * time.Second, -1, 0},
		{time.Hour, 0, 10 * time.Minute},
		{time.Hour, 1, 0},
	} {
		o, ok := h.Step(viewtest.Start.Add(tt.at), tt.step)
		if ok != (tt.want > 0) || ok && !o.Taken.Equal(viewtest.Start.Add(tt.want)) {
			t.Errorf("%d steps from %v: %v %v, want %v", tt.step, tt.at, o.Taken, ok, tt.want)
		}
	}
	if o, ok := h.Worst(); !ok || o.Taken.Before(viewtest.Start.Add(5*time.Minute)) || o.Rows[0].Container != viewtest.Victim {
		t.Errorf("the worst is at %v: %v", o.Taken, ok)
	}

	// A frame that is not later than the last is no step in time.
	if _, ok := h.Add(viewtest.Host{Containers: 6, Every: 10 * time.Second}.Frame(3)); ok || h.Len() != 60 {
		t.Error("an old frame made an overview")
	}
}

// A bounded history keeps what it must, and no more.
func TestHistoryKeep(t *testing.T) {
	h := History{Keep: time.Minute}
	host := viewtest.Host{Containers: 5, Every: 10 * time.Second}
	for i := range 100 {
		h.Add(host.Frame(i))
	}
	if first, last := h.Bounds(); h.Len() != 7 || last.Sub(first) != time.Minute {
		t.Errorf("%d overviews over %v", h.Len(), last.Sub(first))
	}
	old := loaded(t, host, 200)
	h.Before(old)
	if first, last := h.Bounds(); h.Len() != 99 || !last.Equal(host.Taken(99)) || !first.Equal(host.Taken(1)) {
		t.Errorf("with the past, %d overviews from %v to %v", h.Len(), first, last)
	}
	if !slices.IsSortedFunc(h.list, func(a, b api.Overview) int { return a.Taken.Compare(b.Taken) }) {
		t.Error("they are not in order")
	}
}

// A recording from somebody else takes bounded memory, however much there is in each of its frames.
func TestHistoryRoom(t *testing.T) {
	f := viewtest.Host{Containers: 5}.Frame(0)
	long := strings.Repeat("x", room/4)
	f.Containers[0].Name = long
	var h History
	for i := range 10 {
		f.Taken = viewtest.Start.Add(time.Duration(i) * time.Second)
		before := h
		h.Add(f)
		if h.size > room || before.Len() > 0 && before.list[0].Taken.After(h.list[0].Taken) {
			t.Errorf("%d bytes, and a copy of before begins at %v", h.size, before.list[0].Taken)
		}
	}
	old := h
	h.Before(&old)
	if _, last := h.Bounds(); !h.Cut || h.Len() != 3 || !last.Equal(f.Taken) {
		t.Errorf("%d overviews to %v are left, cut: %v", h.Len(), last, h.Cut)
	}
	for i := range f.Containers {
		f.Containers[i].Name = long
	}
	f.Taken = f.Taken.Add(1)
	if h.Add(f); h.Len() != 0 || h.size != 0 {
		t.Errorf("of what is too large alone %d are left", h.Len())
	}
}

func TestSeries(t *testing.T) {
	h := loaded(t, viewtest.Host{Containers: 5, Calm: 30}, 61)
	slowed := func(r api.OverviewRow) float64 { return r.Slowed }
	at := viewtest.Start.Add(10 * time.Minute)
	got := h.Series(viewtest.Victim, slowed, at, 20*time.Minute, 20)
	for i, v := range got {
		switch {
		case i < 10 && !math.IsNaN(v): // before the recording
			t.Errorf("minute %d: %v", i, v)
		case i >= 10 && i < 15 && v != 0, i >= 15 && v < 0.1:
			t.Errorf("minute %d: %v", i, v)
		}
	}
	// Within a part, a later series has the same values.
	again := h.Series(viewtest.Victim, slowed, at.Add(-20*time.Second), 20*time.Minute, 20)
	if !slices.Equal(got[10:19], again[10:19]) {
		t.Errorf("%v, 20 s before %v", got, again)
	}
}

func TestBlame(t *testing.T) {
	h := loaded(t, viewtest.Host{Containers: 5, Calm: 30}, 61)
	at := viewtest.Start.Add(10 * time.Minute)
	all, of := h.Blame(at, Span)
	by := all[viewtest.Victim]
	if len(by) != 2 || by[0].Name != "flood" || by[0].Cause != api.SlowedByPackets || by[0].Now <= by[1].Now {
		t.Fatalf("%+v", by)
	}
	if ratio := by[0].Mean / by[0].Now; math.Abs(ratio-0.5) > 1e-6 { // half of the time
		t.Errorf("in the mean %v of what it is now", ratio)
	}
	if of := of[viewtest.Culprit]; len(of) != 1 || of[0].Other != viewtest.Victim || of[0].Now != by[0].Now {
		t.Errorf("%+v", of)
	}
	if all[99] != nil || of[99] != nil {
		t.Errorf("of nobody: %v, %v", all[99], of[99])
	}
}
