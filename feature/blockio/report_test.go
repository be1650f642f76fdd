package blockio

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/policy"
)

// A reservation goes with its disk. The status reports that, and nothing else is affected. A capacity
// that the file cannot keep is refused.
func TestVanished(t *testing.T) {
	h := newHost(t)
	gone, stays := h.disk(1000), h.disk(1000)
	a, _ := h.container("a")
	b, _ := h.container("b")
	ctx := t.Context()
	must(t, h.Apply(ctx, target(t, a, "io.reserve: "+gone.Path+" riops=100")))
	must(t, h.Apply(ctx, target(t, b, "io.reserve: "+stays.Path+" riops=100")))
	gone.Close()
	states := func() (of [2]string) {
		t.Helper()
		for range 2 { // something is measured in between
			_, err := h.Decide(nil, true)
			must(t, err)
		}
		for _, r := range h.report().Reservations {
			switch r.Container {
			case api.ID(a.ID):
				of[0] = r.State
			case api.ID(b.ID):
				of[1] = r.State
			}
		}
		return of
	}
	testkit.Same(t, "states", [2]string{decide.StateLost, decide.StateIdle}, states())
	testkit.Fails(t, "reserved of what has gone", h.Apply(ctx, target(t, b, "io.reserve: "+gone.Path+" riops=1")), "no disk in it")
	must(t, h.Apply(ctx, target(t, a, "netcpu: observe")))
	testkit.Same(t, "states", [2]string{"", decide.StateIdle}, states())

	// The directory of the file cannot be made: a file is in its place.
	h.capacities.file.Path = filepath.Join(h.state, "file", "capacities.json")
	must(t, os.WriteFile(filepath.Join(h.state, "file"), nil, 0o600))
	_, err := h.Command(ctx, nil, api.Ask{Body: api.CapacityRequest{Device: stays.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 5, WriteIOPS: 5}}})
	if e := (*api.Error)(nil); !errors.As(err, &e) || e.Status != 503 || !strings.Contains(e.Text, h.capacities.file.Path) && !strings.Contains(e.Text, "file") {
		t.Errorf("a capacity that cannot be kept: %v", err)
	}
	d, err := block.Open("/sys", stays.Path)
	must(t, err)
	testkit.Same(t, "capacity", uint64(1000), h.BlockIO.capacity(d).ReadIOPS)
}

// A report over a given time has the details of that time.
func TestDetail(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("a")
	must(t, h.Apply(t.Context(), target(t, c, "io.reserve: "+l.Path+" riops=100")))
	run(t, cg, "disk", "--to", l.Path, "--size", "4096", "--conns", "2")
	ask := func(of *container.Container) api.BlockIO {
		t.Helper()
		out, err := h.Report(t.Context(), of, api.Ask{Over: 300 * time.Millisecond})
		must(t, err)
		return out.(api.BlockIO)
	}
	for end := time.Now().Add(90 * time.Second); ; {
		all, one := ask(nil), ask(&c)
		if len(all.Threads) > 0 || len(one.Interrupts) > 0 {
			t.Fatalf("threads of all %+v, interrupts of one %+v", all.Threads, one.Interrupts)
		}
		timer := false
		for _, i := range all.Interrupts {
			timer = timer || i.Soft && i.Source == "SCHED"
		}
		var switches uint64
		for _, row := range one.Rows {
			switches += row.Voluntary
		}
		if timer && len(one.Threads) > 1 && one.Threads[0].Voluntary > 0 && switches > 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("interrupts %+v, threads %+v, rows %+v", all.Interrupts, one.Threads, one.Rows)
		}
	}
}

// A capped container appears with its cap even without I/O.
func TestCappedIsShown(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, _ := h.container("hog")
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	at := decide.Disk{Major: d.Major, Minor: d.Minor}
	h.actions = map[container.ID]decide.Action{c.ID: {Caps: map[decide.Disk]api.BlockIOFigures{at: {ReadIOPS: 16}}}}
	rows := h.report().Rows
	if len(rows) != 1 || rows[0].Container != api.ID(c.ID) || rows[0].Disk != filepath.Base(l.Path) || !strings.Contains(rows[0].Action, "16") {
		t.Errorf("rows %+v, want one of %v at %s with its cap", rows, c.ID, l.Path)
	}
}

// A reader gets each event once, with its id. An id of an earlier agent is ignored.
func TestEventsAfter(t *testing.T) {
	events := newEventLog()
	add := func(text string) { events.add([]api.BlockIOEvent{{What: "interference", Text: text}}) }
	add("one")
	got := make(chan []api.BlockIOEvent, 1)
	for _, after := range []uint64{0, 7} {
		out, err := events.wait(t.Context(), after)
		if err != nil || len(out) != 1 || out[0].ID != 1 {
			t.Errorf("after %d: %+v, %v", after, out, err)
		}
	}
	go func() {
		out, _ := events.wait(t.Context(), 1)
		got <- out
	}()
	add("two")
	if out := <-got; len(out) != 1 || out[0].ID != 2 || out[0].Text != "two" {
		t.Errorf("after 1: %+v", out)
	}
}

// TestGuarantees has a disk of known capacity, and a missing one.
func TestGuarantees(t *testing.T) {
	h := newHost(t)
	h.cfg.Disks = policy.Disks{"data": h.disk(1000).Path, "gone": "/dev/nowhere"}
	got, err := h.Guarantees()
	if want := (map[string]uint64{"data-riops": 450, "data-wiops": 450}); !maps.Equal(got, want) || err == nil || !strings.Contains(err.Error(), "disk gone: ") {
		t.Errorf("%v, %v; want %v, and why nothing of the other", got, err, want)
	}
}
