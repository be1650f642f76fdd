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
	"github.com/fairlead-project/fairlead/internal/testkit/faults"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/policy"
)

func TestMain(m *testing.M) {
	topology.Reexec(faults.Reexec(topology.Subject(subject)))
	if role := os.Getenv(childEnv); role != "" {
		child(role)
	}
	testkit.Main(m)
}

const (
	victim container.ID = 1
	ms                  = time.Millisecond
)

// second returns the time of a numbered second.
func second(n int) time.Time { return time.Unix(1_000_000+int64(n), 0) }

var must = testkit.Must

// host is a feature on this kernel, with everything that it needs.
type host struct {
	*BlockIO
	t       *testing.T
	journal *journal.Journal
	roster  *topology.Containers
	state   string
}

func newHost(t *testing.T) *host {
	t.Helper()
	testkit.NeedRoot(t)
	h := &host{t: t, journal: testkit.Journal(t, journal.Open), roster: new(topology.Containers), state: t.TempDir()}
	h.open()
	t.Cleanup(func() { must(t, h.Close()) })
	return h
}

// open makes the feature, like an agent that restarts.
func (h *host) open() {
	h.t.Helper()
	f, err := New(Config{Host: feature.Host{Roots: kernel.Default(), Journal: h.journal, Containers: h.roster}, Capacities: filepath.Join(h.state, "lib", "capacities.json")})
	must(h.t, err)
	h.BlockIO = f
}

// container makes a container with separate cgroups.
func (h *host) container(name string) (container.Container, testkit.CG) {
	h.t.Helper()
	cg := testkit.Cgroup(h.t)
	if cg.V2 == "" || cg.IO == "" || cg.CPU == "" {
		testkit.Skip(h.t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
	}
	id, err := cgroup.ID(cg.V2)
	must(h.t, err)
	c := container.Container{ID: container.ID(id), Name: name, Cgroup: container.Cgroup{V2: cg.V2, CPU: cg.CPU, IO: cg.IO}}
	*h.roster = append(*h.roster, c)
	return c, cg
}

// disk makes one of a known capacity.
func (h *host) disk(capacity uint64) *testkit.Disk {
	h.t.Helper()
	l := testkit.NewDisk(h.t, 4<<20)
	h.capacity(l.Path, capacity)
	return l
}

func (h *host) capacity(device string, iops uint64) {
	h.t.Helper()
	_, err := h.Command(h.t.Context(), nil, api.Ask{Body: api.CapacityRequest{Device: device, BlockIOFigures: api.BlockIOFigures{ReadIOPS: iops, WriteIOPS: iops}}})
	must(h.t, err)
}

// apply puts a Target in force, in part if this host has only cgroup v1.
func (h *host) apply(t policy.Target) {
	h.t.Helper()
	if err := h.Apply(h.t.Context(), t); !errors.Is(err, feature.ErrPartly) {
		must(h.t, err)
	}
}

// target makes a container's Target.
func target(t *testing.T, c container.Container, settings ...string) policy.Target {
	t.Helper()
	text := "match: {name: " + c.Name + "}\nset:\n"
	for _, s := range settings {
		text += "  " + s + "\n"
	}
	p, problems := policy.ParseFile("test", []byte(text))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	targets, problems := p.Resolve([]container.Container{c})
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return targets[0]
}

func (h *host) report() api.BlockIO {
	h.t.Helper()
	out, err := h.Report(h.t.Context(), nil, api.Ask{})
	must(h.t, err)
	return out.(api.BlockIO)
}

// reserved returns the row of a container's reservation.
func (h *host) reserved(id container.ID) api.BlockIORow {
	h.t.Helper()
	for _, r := range h.report().Rows {
		if r.Container == api.ID(id) && r.Reserved != nil {
			return r
		}
	}
	return api.BlockIORow{}
}

// run starts a generator in cgroups, on CPU 0.
func run(t *testing.T, cg testkit.CG, args ...string) *load.Board {
	t.Helper()
	board, _ := topology.InGroup(t, cg, 0, args...)
	return board
}

// A burner beside a reservation is named and made to yield, and then gets its settings back.
func TestInterference(t *testing.T) {
	h := newHost(t)
	l := h.disk(100_000_000)
	db, dbCG := h.container("db")
	batch, batchCG := h.container("batch")
	must(t, weightOf(batchCG).Write("321"))
	ctx := t.Context()
	// More than any disk can do, so that it is always missed.
	must(t, h.Apply(ctx, target(t, db, "io.reserve: "+l.Path+" riops=50000000")))
	leave := target(t, batch, "io.yield: auto")
	must(t, h.Apply(ctx, leave))
	run(t, dbCG, "disk", "--to", l.Path, "--size", "4096", "--conns", "16")
	for range 3 {
		run(t, batchCG, "burn")
	}
	decided := h.untilDecided("it yields", leave, func(d policy.Target) bool { return d.Settings.IOYield == policy.YieldIdle })
	if reason := origin(decided, yieldKey).Reason; !strings.Contains(reason, `"db" waited for it`) {
		t.Errorf("reason %q", reason)
	}
	testkit.Gives(t, "the burner's cgroup", cgroup.Idled)(weightOf(batchCG).Read())
	r := h.report()
	state := ""
	for _, row := range r.Rows {
		if row.Container == api.ID(db.ID) {
			state = row.State
		}
		if row.Container == api.ID(batch.ID) && row.Reserved != nil {
			t.Errorf("%+v", row)
		}
	}
	if state != decide.StateContended || len(r.Events) == 0 || r.Events[0].What != "interference" {
		t.Errorf("state %q, events %+v", state, r.Events)
	}

	if e := h.Evidence(batch.ID); len(e) == 0 || !strings.Contains(e[len(e)-1].Text, `"db" waited for it`) {
		t.Errorf("evidence about the burner %+v", e)
	}
	if e := h.Evidence(db.ID); len(e) == 0 || !strings.Contains(e[0].Text, "interference at loop") {
		t.Errorf("evidence about the victim %+v", e)
	}
	// A restarted agent continues, and releases the burner when policy says so.
	must(t, h.Close())
	h.open()
	if left := h.Adopt(h.journal.Entries()); len(left) != 1 || left[0].Container != batch.ID || left[0].Value != "idle" || !left[0].Expiry.Equal(decided.Until(yieldKey)) {
		t.Errorf("adopted %+v", left)
	}
	must(t, h.Apply(ctx, leave))
	testkit.Gives(t, "the burner's weight", "321")(weightOf(batchCG).Read())
	testkit.None(t, "left in the journal", h.journal.Entries())
}

// Caps and yielding that policy asks for are in force, and are restored one by one.
func TestKnobs(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	ctx := t.Context()
	state := func() string {
		t.Helper()
		var parts []string
		if now, _ := throttle(t, cg, l, cgroup.Limits{}); now != "" {
			parts = append(parts, now)
		}
		if idle := value(t, weightOf(cg)); idle == cgroup.Idled {
			parts = append(parts, idle)
		}
		b, err := cgroup.ReadBandwidth(cg.CPU)
		must(t, err)
		if b.Limited {
			parts = append(parts, b.Quota.String())
		}
		return strings.Join(parts, " ")
	}
	caps := func(riops, wbps string) string {
		if cg.IO == cg.V2 {
			return fmt.Sprintf("rbps=max wbps=%s riops=%s wiops=max", wbps, riops)
		}
		return riops + " " + wbps
	}
	for _, x := range []struct {
		settings []string
		want     string
	}{
		{nil, ""}, // observe
		{[]string{"io.max: " + l.Path + " riops=70 wbps=1mb"}, caps("70", "1048576")},
		{[]string{"io.max: " + l.Path + " riops=50 wbps=1mb", "io.yield: idle"}, caps("50", "1048576") + " idle"},
		{[]string{"io.yield: quota"}, "idle 20ms"},
		{[]string{"io.yield: quota"}, "idle 20ms"},
		{[]string{"io.yield: idle"}, "idle"},
		{[]string{"io.yield: off"}, ""},
		{[]string{"io.yield: quota", "io.max: " + l.Path + " riops=50 wbps=2mb"}, caps("50", "2097152") + " idle 20ms"},
	} {
		h.apply(target(t, c, append([]string{"netcpu: observe"}, x.settings...)...))
		testkit.Same(t, fmt.Sprint(x.settings), x.want, state())
	}
	must(t, h.Remove(ctx, c.ID))
	if got := state(); got != "" || len(h.journal.Entries()) != 0 {
		t.Errorf("after Remove: %q, %+v", got, h.journal.Entries())
	}
	if h.meter != nil {
		t.Error("something is measured, though nothing was reserved")
	}
}

// Reservations are admitted against the capacity, which outlives the agent. A refusal changes nothing.
func TestReserve(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000) // 900 of them to be had
	a, _ := h.container("a")
	b, _ := h.container("b")
	ctx := t.Context()
	reserve := func(c container.Container, figures string) error {
		return h.Apply(ctx, target(t, c, "io.reserve: "+l.Path+" "+figures))
	}
	must(t, reserve(a, "riops=600"))
	if h.meter == nil {
		t.Error("nothing is measured, though something is reserved")
	}
	var refusal *decide.Refusal
	if err := reserve(b, "riops=200 wiops=101"); !errors.As(err, &refusal) || !strings.Contains(err.Error(), `"a"`) || refusal.Reads != 300 {
		t.Errorf("beyond what is left: %v", err)
	}
	if out, err := h.Command(ctx, &b, api.Ask{Body: api.ReservationChange{Device: l.Path, Figures: api.BlockIOFigures{ReadIOPS: 5}}}); err != nil {
		t.Error(err)
	} else if set := out.(api.SetRequest); set.Set[reserveKey] != l.Path+" riops=5" || set.Was[reserveKey] != l.Path+" riops=200 wiops=101" {
		t.Errorf("in the place of what was refused: %+v", set)
	}
	must(t, reserve(b, "riops=200 wiops=100"))
	if err := reserve(a, "riops=601"); !errors.As(err, &refusal) {
		t.Errorf("more for the first: %v", err)
	}
	must(t, reserve(a, "riops=600"))
	got := h.report().Reservations
	if len(got) != 2 || got[0].Reserved.ReadIOPS != 600 || got[1].Reserved.WriteIOPS != 100 || got[0].State != decide.StateIdle {
		t.Errorf("reserved: %+v", got)
	}

	// The keys that a change sets, and the changes that are refused.
	change := func(c container.Container, in api.ReservationChange) (api.SetRequest, error) {
		out, err := h.Command(ctx, &c, api.Ask{Body: in})
		set, _ := out.(api.SetRequest)
		return set, err
	}
	if set, err := change(a, api.ReservationChange{ID: got[0].ID, Figures: api.BlockIOFigures{WriteBytes: 4096}}); err != nil || set.Set[reserveKey] != l.Path+" wbps=4096" || set.Was[reserveKey] != l.Path+" riops=600" {
		t.Errorf("%+v, %v", set, err)
	}
	if set, err := change(a, api.ReservationChange{Device: l.Path, Replace: true, Figures: api.BlockIOFigures{WriteBytes: 4096}}); err != nil || set.Set[reserveKey] != l.Path+" wbps=4096" {
		t.Errorf("in place of another: %+v, %v", set, err)
	}
	for what, x := range map[string]struct {
		in     api.ReservationChange
		status int
	}{
		"twice":           {api.ReservationChange{Device: l.Path, Figures: api.BlockIOFigures{ReadIOPS: 1}}, 409},
		"of nothing":      {api.ReservationChange{Device: l.Path}, 400},
		"no device":       {api.ReservationChange{Device: "/dev/fl-none", Figures: api.BlockIOFigures{ReadIOPS: 1}}, 400},
		"not a device":    {api.ReservationChange{Device: "/dev/null", Figures: api.BlockIOFigures{ReadIOPS: 1}}, 400},
		"unknown":         {api.ReservationChange{ID: "1-2-3", Figures: api.BlockIOFigures{ReadIOPS: 1}}, 404},
		"policy's own":    {api.ReservationChange{ID: got[0].ID, Delete: true}, 409},
		"another's":       {api.ReservationChange{ID: got[1].ID, Delete: true}, 404},
		"changed to zero": {api.ReservationChange{ID: got[0].ID}, 400},
	} {
		_, err := change(a, x.in)
		if e := (*api.Error)(nil); !errors.As(err, &e) || e.Status != x.status {
			t.Errorf("%s: %v, want status %d", what, err, x.status)
		}
	}

	must(t, h.Close())
	h.open()
	must(t, reserve(b, "riops=200 wiops=100"))
	must(t, reserve(a, "riops=600"))
	testkit.Fails(t, "an agent that was started again does not know what the disk can do", reserve(a, "riops=601"))
	must(t, h.Remove(ctx, b.ID))
	must(t, reserve(a, "riops=900"))
	must(t, h.Remove(ctx, a.ID))
	if h.meter != nil {
		t.Error("something is measured, though nothing is reserved any more")
	}
}

// An invalid capacity changes nothing.
func TestCapacityRefusals(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	for what, in := range map[string]api.CapacityRequest{
		"no device":      {Device: "/dev/fl-none"},
		"nothing":        {Device: l.Path},
		"one direction":  {Device: l.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1}},
		"too much":       {Device: l.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1 << 40}},
		"too few bytes":  {Device: l.Path, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 10, WriteIOPS: 1, ReadBytes: 40959}},
		"no room at all": {Device: l.Path, Headroom: 1, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1}},
		"negative":       {Device: l.Path, Headroom: -1, BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1}},
	} {
		_, err := h.Command(t.Context(), nil, api.Ask{Body: in})
		if e := (*api.Error)(nil); !errors.As(err, &e) || e.Status != 400 {
			t.Errorf("%s: %v", what, err)
		}
	}
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	testkit.Same(t, "capacity", uint64(1000), h.BlockIO.capacity(d).ReadIOPS)
}

func FuzzLoadCapacities(f *testing.F) {
	for _, s := range []string{"", "null", "{}", `{"vda": {"read_iops": 5, "write_iops": 5, "Headroom": 0.1}}`, `{"vda": {"read_iops": -1}}`, `{"vda": {"Headroom": 1e400}}`,
		`{"version": 2, "disks": {"vda": {"seen": {"read_iops": 5}}}}`, `{"version": 3}`, `{"version": 2, "disks": null}`, `{"version": 2, "disks": {"vda": {"depth_1": {"read_iops": 5}}}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "capacities.json")
		must(t, os.WriteFile(path, data, 0o600))
		all, err := loadCapacities(path)
		if all.of == nil || err != nil && len(all.of) > 0 {
			t.Fatalf("%v, %v", all.of, err)
		}
		for id, c := range all.of {
			if c.Check() != nil {
				t.Fatalf("%q: %+v", id, c)
			}
		}
	})
}

// throttle returns a cgroup's limits on a disk, and the text by which others would set them.
func throttle(t *testing.T, cg testkit.CG, of *testkit.Disk, limits cgroup.Limits) (now, others string) {
	t.Helper()
	d, err := block.Open("/sys", of.Path)
	must(t, err)
	var read, made []string
	for _, line := range cgroup.Throttle(cg.IO, cg.IO == cg.V2, d.Number(), limits) {
		if now := value(t, line); now != "" {
			read = append(read, now)
		}
		if line.Value != "" {
			made = append(made, line.Value)
		}
	}
	return strings.Join(read, " "), strings.Join(made, " ")
}

// value reads a knob.
func value(t *testing.T, k interface{ Read() (string, error) }) string {
	t.Helper()
	v, err := k.Read()
	must(t, err)
	return v
}

// weightOf is the knob of a cgroup's weight.
func weightOf(cg testkit.CG) journal.Knob {
	k, _ := cgroup.WeightKnob(cg.CPU, cg.CPU == cg.V2)
	return k
}
