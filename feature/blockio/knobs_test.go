package blockio

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/policy"
)

// A reservation that no longer fits stays as it was admitted, and everything else that
// policy says of its container is done all the same; so it is with one that is refused.
func TestReservationThatDoesNotFit(t *testing.T) {
	h := newHost(t)
	l := h.disk(10_000)
	c, cg := h.container("db")
	must(t, h.Apply(t.Context(), target(t, c, "io.reserve: "+l.Path+" riops=5000")))
	h.capacity(l.Path, 4000)
	idle := func(settings ...string) bool {
		t.Helper()
		err := h.Apply(t.Context(), target(t, c, settings...))
		if err == nil || !strings.Contains(err.Error(), l.Path) {
			t.Errorf("%q: %v", settings, err)
		}
		kept := strings.Contains(settings[0], "riops=5000")
		var refusal *decide.Refusal
		if errors.Is(err, feature.ErrPartly) != kept || !errors.As(err, &refusal) {
			t.Errorf("%q: %v", settings, err)
		}
		if got := h.managed[c.ID].reserved; len(got) != 1 || got[0].figures.ReadIOPS != 5000 {
			t.Errorf("%q: it has reserved %+v", settings, got)
		}
		return value(t, weightOf(cg)) == cgroup.Idled
	}
	for _, reserve := range []string{"riops=5000", "riops=6000"} {
		if !idle("io.reserve: "+l.Path+" "+reserve, "io.yield: idle") {
			t.Errorf("%s: it does not yield", reserve)
		}
		if idle("io.reserve: "+l.Path+" "+reserve, "io.yield: off") {
			t.Errorf("%s: it yields still", reserve)
		}
	}
}

// Caps that somebody else has set count where they are stricter, also those that policy
// does not name, and are back in the end. Two names of a disk are refused, and leave what
// is in force.
func TestStricterCaps(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	owners := cgroup.Limits{WriteIOPS: 50, ReadBytes: 1 << 20}
	for _, line := range cgroup.Throttle(cg.IO, cg.IO == cg.V2, d.Number(), owners) {
		if line.Value != "" {
			must(t, line.Write(line.Value))
		}
	}
	for _, x := range []struct {
		max  string
		want cgroup.Limits
	}{
		{"wiops=500", owners},
		{"wiops=20 riops=70", cgroup.Limits{ReadIOPS: 70, WriteIOPS: 20, ReadBytes: 1 << 20}},
		{"wiops=500 riops=70", cgroup.Limits{ReadIOPS: 70, WriteIOPS: 50, ReadBytes: 1 << 20}},
	} {
		h.apply(target(t, c, "io.max: "+l.Path+" "+x.max))
		if got, want := throttle(t, cg, l, x.want); got != want {
			t.Errorf("%s: %s, want %s", x.max, got, want)
		}
	}
	dir, err := os.MkdirTemp("/dev", "fl-test-")
	must(t, err)
	defer os.RemoveAll(dir)
	must(t, os.Symlink(l.Path, dir+"/alias"))
	was, owned := throttle(t, cg, l, owners)
	err = h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" wiops=5; "+dir+"/alias wiops=6", "io.yield: idle"))
	if now, _ := throttle(t, cg, l, owners); err == nil || !strings.Contains(err.Error(), "by one name") || now != was {
		t.Errorf("two names of a disk: %v, %s", err, now)
	}
	testkit.Gives(t, "two names of a disk: it does not yield", cgroup.Idled)(weightOf(cg).Read())
	must(t, h.Remove(t.Context(), c.ID))
	if got, _ := throttle(t, cg, l, owners); got != owned || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end: %s, %+v", got, h.journal.Entries())
	}
}

// What policy itself says holds until it is changed; with a decision lapses only what was
// decided.
func TestUntil(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, _ := h.container("batch")
	at := time.Now().Add(time.Hour)
	said := target(t, c, "io.yield: idle", "io.interrupts: auto")
	decided, err := said.With([]policy.Decision{
		{Container: c.ID, Key: interruptsKey, Value: "off", Instead: "auto", Expiry: at},
		{Container: c.ID, Key: maxKey, Value: l.Path + " riops=70", Expiry: at},
	}, time.Now())
	must(t, err)
	h.apply(decided)
	entries := h.journal.Entries()
	if len(entries) != 2 {
		t.Errorf("%+v", entries)
	}
	for _, e := range entries {
		if caps := cgroup.IsThrottle(e.Ref); !e.Expiry.IsZero() != caps || caps && !e.Expiry.Equal(at) {
			t.Errorf("%+v lapses at %v", e.Ref, e.Expiry)
		}
	}
}

// group is a real-time container below another group.
func (h *host) group(above testkit.CG, name string) (container.Container, int) {
	h.t.Helper()
	cg := testkit.CG{V2: filepath.Join(above.V2, name), CPU: filepath.Join(above.CPU, name)}
	for _, dir := range []string{cg.V2, cg.CPU} {
		must(h.t, os.Mkdir(dir, 0o755))
		h.t.Cleanup(func() { must(h.t, os.Remove(dir)) })
	}
	id, err := cgroup.ID(cg.V2)
	must(h.t, err)
	sleeper := cg.Sleeper(h.t)
	c := container.Container{ID: container.ID(id), Name: name, Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU}}
	*h.roster = append(*h.roster, c)
	return c, sleeper.Pid
}

// A budget in a real-time group is renewed with the decision for it, the parent's too. It
// is that part of the group's period that it is of a second. What one container cannot have
// is no error of another. A thread is what it was before, also where its group keeps a
// budget of its own.
func TestRealtimeGroups(t *testing.T) {
	h := newRealtime(t)
	a, b, above := h.a, h.b, h.above
	period := cgroup.File(filepath.Join(a.Cgroup.CPU, "cpu.rt_period_us"))
	must(t, period.Write("100000"))
	must(t, cgroup.RT(above.CPU).Write("30000"))
	must(t, cgroup.RT(b.Cgroup.CPU).Write("30000"))
	h.check("before", "30000 0 30000", false, false)

	at := time.Now().Add(time.Hour)
	for _, until := range []time.Time{at, at.Add(time.Hour)} {
		decided, err := target(t, a, "netcpu: observe").With([]policy.Decision{{Container: a.ID, Key: realtimeKey, Value: "50ms", Expiry: until}}, time.Now())
		must(t, err)
		must(t, h.Apply(t.Context(), decided))
		h.check("a", "80000 5000 30000", true, false)
		for _, dir := range []string{above.CPU, a.Cgroup.CPU} {
			if e, _ := h.journal.Entry(cgroup.RT(dir).Ref(), name); !e.Expiry.Equal(until) {
				t.Errorf("the budget of %s lapses at %v, want %v", dir, e.Expiry, until)
			}
		}
	}
	must(t, h.Apply(t.Context(), target(t, b, "io.realtime: 20ms")))
	h.check("both", "100000 5000 50000", true, true)

	must(t, h.Apply(t.Context(), target(t, b, "netcpu: observe")))
	h.check("b has its own again", "80000 5000 30000", true, false)
	h.managed[a.ID].budget = 2 * time.Second // which the kernel refuses
	testkit.Is(t, "of another container", h.Apply(t.Context(), target(t, b, "netcpu: observe")), nil)
	if h.managed[a.ID].unbudgeted == nil {
		t.Error("no error of the one that cannot have its budget")
	}
	must(t, h.Remove(t.Context(), a.ID))
	must(t, h.Remove(t.Context(), b.ID))
	h.check("in the end", "30000 0 30000", false, false)
	testkit.None(t, "left", h.journal.Entries())
	must(t, cgroup.RT(b.Cgroup.CPU).Write("0"))
	must(t, cgroup.RT(above.CPU).Write("0"))
}

// Nor does one that was decided before the container had reserved anything.
func TestAbove(t *testing.T) {
	d := block.Disk{Major: 7}
	for _, x := range []struct {
		reserved    api.BlockIOFigures
		caps, above cgroup.Limits
	}{
		{api.BlockIOFigures{}, cgroup.Limits{ReadIOPS: 16, WriteBytes: 1}, cgroup.Limits{ReadIOPS: 16, WriteBytes: 1}},
		{api.BlockIOFigures{ReadIOPS: 20, WriteIOPS: 5}, cgroup.Limits{ReadIOPS: 16, WriteIOPS: 16}, cgroup.Limits{ReadIOPS: 20, WriteIOPS: 16}},
		{api.BlockIOFigures{ReadIOPS: 20, WriteIOPS: 50}, cgroup.Limits{WriteIOPS: 16}, cgroup.Limits{WriteIOPS: 50}},
		{api.BlockIOFigures{ReadBytes: 1 << 20}, cgroup.Limits{ReadIOPS: 16, ReadBytes: 4096}, cgroup.Limits{ReadIOPS: 256, ReadBytes: 1 << 20}},
		{api.BlockIOFigures{WriteIOPS: 20, WriteBytes: 1 << 20}, cgroup.Limits{WriteIOPS: 16, WriteBytes: 4096}, cgroup.Limits{WriteIOPS: 20, WriteBytes: 1 << 20}},
	} {
		m := managed{reserved: []reservation{{disk: d, figures: x.reserved}}}
		testkit.Same(t, fmt.Sprintf("%+v with %+v", x.caps, x.reserved), x.above, m.above(d, x.caps))
		testkit.Same(t, "at another disk", x.caps, m.above(block.Disk{Major: 8}, x.caps))
	}
}
