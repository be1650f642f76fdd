package blockio

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/mountinfo"
	"github.com/fairlead-project/fairlead/policy"
)

// On cgroup v1 neither buffered writes nor a cgroup below the container's obey a cap. The status says
// so. Reads of the container itself are capped.
func TestThrottleCovered(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	v1 := cg.IO != cg.V2
	for _, x := range []struct {
		caps, says string // on cgroup v1
	}{
		{"riops=70 rbps=1mb", ""},
		{"wbps=5mb", "buffered writes pass at " + l.Path},
		{"wiops=5", "buffered writes pass at " + l.Path},
	} {
		mustSayPartly(t, h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" "+x.caps)), v1 && x.says != "", x.says)
	}
	below := cg.Child(t, "below")
	below.Sleeper(t)
	mustSayPartly(t, h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" riops=5")), v1, `cgroups below the container's ("below") pass`)
	mustSayPartly(t, h.Apply(t.Context(), target(t, c, "netcpu: observe")), false, "")
}

// mustSayPartly fails unless an error says, or does not say, that a part is not covered.
func mustSayPartly(t *testing.T, err error, partly bool, text string) {
	t.Helper()
	if errors.Is(err, feature.ErrPartly) != partly || !partly && err != nil || partly && !strings.Contains(err.Error(), text) {
		t.Errorf("%v, want partly %t: %s", err, partly, text)
	}
}

// On cgroup v2 that depends on the file systems of the disk that the container sees.
func TestWritebackCovered(t *testing.T) {
	for _, x := range []struct {
		mounts []string // type, options
		want   string
	}{
		{[]string{"ext4 rw,errors=remount-ro", "xfs rw", "btrfs rw", "vfat ro"}, ""},
		{[]string{"xfs rw", "vfat rw,fmask=0022"}, "/1 (vfat)"},
		{[]string{"ext4 rw,data=journal", "ntfs3 rw"}, "/0 (ext4) /1 (ntfs3)"},
	} {
		var got []string
		for i, m := range x.mounts {
			typ, super, _ := strings.Cut(m, " ")
			if mount := (mountinfo.Mount{Dir: fmt.Sprintf("/%d", i), Type: typ, Super: super}); !writeback(mount) {
				got = append(got, fmt.Sprintf("%s (%s)", mount.Dir, mount.Type))
			}
		}
		testkit.Same(t, fmt.Sprint(x.mounts), x.want, strings.Join(got, " "))
	}
}

// The status lists everything that does not hold, not only the first part.
func TestCoverSaysAll(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	if cg.IO == cg.V2 {
		return // TestThrottleCovered checks this on cgroup v1
	}
	err := h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" wiops=5", "io.weight: 50"))
	mustSayPartly(t, err, true, "io.weight 50")
	mustSayPartly(t, err, true, "io.max: buffered writes")
}

// Both the container's own cgroup and its parents count when the report names the strictest quota.
func TestQuotaOf(t *testing.T) {
	before := reading{Reading: monitor.Reading{Taken: second(0)}, delays: map[container.ID]delays{
		victim: {throttled: map[string]time.Duration{"/pod/db": time.Second, "/pod": time.Minute}},
	}}
	now := reading{Reading: monitor.Reading{Taken: second(1)}, delays: map[container.ID]delays{
		victim: {throttled: map[string]time.Duration{"/pod/db": 1100 * ms, "/pod": time.Minute + 500*ms, "/new": time.Hour}},
	}}
	d := since(now, before).delays[victim]
	if got := d.quota(); got != "/pod" || d.throttled["/pod"] != 500*ms || d.throttled["/pod/db"] != 100*ms {
		t.Errorf("quota of %q, %v", got, d.throttled)
	}
	testkit.Same(t, "quota of", "", (delays{}).quota())
}

// A missed reservation makes the status partly, with the reason and the remedy. The status changes with
// these, but not every second.
func TestMissedIsPartly(t *testing.T) {
	h := newHost(t)
	l := h.disk(2000)
	c, _ := h.container("db")
	ctx, want := t.Context(), target(t, c, "io.reserve: "+l.Path+" riops=1000")
	must(t, h.Apply(ctx, want))
	at := decide.Place{Container: c.ID, Disk: h.managed[c.ID].reserved[0].at()}
	var told []container.ID
	h.Notify(func(id container.ID) { told = append(told, id) })
	for _, x := range []struct {
		after   time.Duration
		state   string
		mend    string
		changed bool
	}{
		{0, decide.StateMet, "", false},
		{time.Second, decide.StateContended, `let "x" yield`, true},
		{2 * time.Second, decide.StateContended, `let "x" yield`, false},
		{3 * time.Second, decide.StateMet, "", false},
		{4 * time.Second, decide.StateContended, `let "x" yield`, false},
		{5 * time.Second, decide.StateThrottled, "raise the quota", false},
		{6 * time.Second, decide.StateThrottled, "raise the quota", true},
		{12 * time.Second, decide.StateLess, "", true},
		{20 * time.Second, decide.StateIdle, "", false},
	} {
		h.standings = map[decide.Place]decide.Standing{at: {State: x.state, Evidence: "300 of 1000 reads a second", Mend: x.mend}}
		h.tellChanged(second(0).Add(x.after), true)
		if changed := slices.Equal(told, []container.ID{c.ID}); changed != x.changed {
			t.Errorf("after %v: told of %v, want that it has changed: %v", x.after, told, x.changed)
		}
		told = nil
		err := h.Apply(ctx, want)
		if (err == nil) != (x.mend == "") || err != nil && (!errors.Is(err, feature.ErrPartly) ||
			!strings.Contains(err.Error(), l.Path+" is "+x.state+": 300 of 1000 reads a second; "+x.mend)) {
			t.Errorf("after %v: %v", x.after, err)
		}
		out := h.report().Reservations[0]
		if out.State != x.state || out.Mend != x.mend {
			t.Errorf("after %v: %+v", x.after, out)
		}
	}
	h.failed = "no BTF"
	if err := h.unmet(h.managed[c.ID]); !errors.Is(err, feature.ErrPartly) || !strings.Contains(err.Error(), "not known: no BTF") {
		t.Errorf("while nothing is measured: %v", err)
	}
	must(t, h.Remove(ctx, c.ID))
}

// A cap holds on the disk to which its name leads, even after that has changed, after the disk was
// away, and after its partition table was read again. A new disk with the same number is another disk:
// measurements of the old one do not hold for it.
func TestNameMoves(t *testing.T) {
	h := newHost(t)
	var told []container.ID
	h.Notify(func(id container.ID) { told = append(told, id) })
	both := []*testkit.Disk{h.disk(1000), testkit.NewFixedDisk(t, 4<<20)}
	h.capacity(both[1].Path, 1000)
	node := alias(t, both[0].Path)
	c, cg := h.container("batch")
	db, _ := h.container("db")
	reserves := target(t, db, "io.reserve: "+both[1].Path+" riops=1")
	must(t, h.Apply(t.Context(), reserves))
	targets := []policy.Target{target(t, c, "io.max: "+node+" wiops=70"), reserves}
	leads := func(to string) func() {
		return func() {
			os.Remove(node)
			must(t, os.Symlink(to, node))
		}
	}
	const nowhere = -1
	for _, step := range []struct {
		what  string
		do    func()
		at    int
		moves bool
	}{
		{"at first", func() {}, 0, false},
		{"another disk", leads(both[1].Path), 1, true},
		{"gone", func() { must(t, os.Remove(node)) }, nowhere, true},
		{"back", leads(both[1].Path), 1, true},
		{"a partition", func() { both[1].Partition(true); leads(both[1].Path + "p1")() }, 1, false},
		{"read again without it", func() { both[1].Partition(false) }, nowhere, true},
		{"read again with it", func() { both[1].Partition(true) }, 1, true},
		{"the disk by its own name", leads(both[1].Path), 1, false},
		{"used anew", func() { both[1].Replace(4 << 20) }, 1, true},
	} {
		step.do()
		told = nil
		_, err := h.Decide(targets, true)
		must(t, err)
		if slices.Contains(told, c.ID) != step.moves || step.what == "used anew" && !slices.Contains(told, db.ID) {
			t.Errorf("%s: another Apply is asked for: %v", step.what, told)
		}
		if err := h.Apply(t.Context(), targets[0]); (step.at < 0) != errors.Is(err, block.ErrNoDevice) {
			t.Errorf("%s: %v", step.what, err)
		}
		told = nil
		_, err = h.Decide(targets, true)
		must(t, err)
		if slices.Contains(told, c.ID) {
			t.Errorf("%s: and another", step.what)
		}
		for i, d := range both {
			if got, _ := throttle(t, cg, d, cgroup.Limits{}); step.at >= 0 && (got != "") != (i == step.at) {
				t.Errorf("%s: disk %d is capped %q", step.what, i, got)
			}
		}
	}
	mustSayPartly(t, h.Apply(t.Context(), reserves), true, "nobody has measured what "+both[1].Path)
	must(t, h.Remove(t.Context(), c.ID))
	must(t, h.Remove(t.Context(), db.ID))
}

// A reservation that no longer fits stays as it was admitted, and the rest of the container's policy is
// still applied. The same holds for a refused reservation.
func TestReservationThatDoesNotFit(t *testing.T) {
	h := newHost(t)
	l := h.disk(10_000)
	c, cg := h.container("db")
	must(t, h.Apply(t.Context(), target(t, c, "io.reserve: "+l.Path+" riops=5000")))
	h.capacity(l.Path, 4000)
	idle := func(settings ...string) bool {
		t.Helper()
		err := h.Apply(t.Context(), target(t, c, settings...))
		testkit.Fails(t, fmt.Sprintf("%q", settings), err, l.Path)
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

// A cap that others have set counts if it is stricter, even if policy does not name it, and is restored
// in the end. Two names of a disk are refused, and change nothing that is in force.
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
	other := alias(t, l.Path)
	was, owned := throttle(t, cg, l, owners)
	err = h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" wiops=5; "+other+" wiops=6", "io.yield: idle"))
	if now, _ := throttle(t, cg, l, owners); err == nil || !strings.Contains(err.Error(), "by one name") || now != was {
		t.Errorf("two names of a disk: %v, %s", err, now)
	}
	testkit.Gives(t, "two names of a disk: it does not yield", cgroup.Idled)(weightOf(cg).Read())
	must(t, h.Remove(t.Context(), c.ID))
	if got, _ := throttle(t, cg, l, owners); got != owned || len(h.journal.Entries()) != 0 {
		t.Errorf("in the end: %s, %+v", got, h.journal.Entries())
	}
}

// A value of policy holds until it changes. When a decision lapses, only its own value goes.
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

// alias gives a disk another name, below /dev as policy requires.
func alias(t *testing.T, disk string) (name string) {
	t.Helper()
	dir, err := os.MkdirTemp("/dev", "fl-test-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	name = filepath.Join(dir, "alias")
	must(t, os.Symlink(disk, name))
	return name
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

// A decision renews its budget in a real-time group, and the parent's. The knob has the same part of
// the group's period as the budget has of a second. A refusal for one container is no error for
// another. Threads return to their old policy, even if their group keeps a budget of its own.
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
		decided, err := target(t, a, "io.realtime: 50ms").With([]policy.Decision{{Container: a.ID, Key: helpKey, Value: string(policy.HelpRealtime), Expiry: until}}, time.Now())
		must(t, err)
		must(t, h.Apply(t.Context(), decided))
		h.check("a", "80000 5000 30000", true, false)
		for _, dir := range []string{above.CPU, a.Cgroup.CPU} {
			if e, _ := h.journal.Entry(cgroup.RT(dir).Ref(), name); !e.Expiry.Equal(until) {
				t.Errorf("the budget of %s lapses at %v, want %v", dir, e.Expiry, until)
			}
		}
	}
	must(t, h.Apply(t.Context(), target(t, b, "io.help: realtime", "io.realtime: 20ms")))
	h.check("both", "100000 5000 50000", true, true)

	must(t, h.Apply(t.Context(), target(t, b, "netcpu: observe")))
	h.check("b has its own again", "80000 5000 30000", true, false)
	h.managed[a.ID].kept, h.managed[a.ID].helpWant = 2*time.Second, 2*time.Second // the kernel refuses it
	testkit.Is(t, "of another container", h.Apply(t.Context(), target(t, b, "netcpu: observe")), nil)
	testkit.Fails(t, "no error of the one that cannot have its budget", h.managed[a.ID].unbudgeted)
	must(t, h.Remove(t.Context(), a.ID))
	must(t, h.Remove(t.Context(), b.ID))
	h.check("in the end", "30000 0 30000", false, false)
	testkit.None(t, "left", h.journal.Entries())
	must(t, cgroup.RT(b.Cgroup.CPU).Write("0"))
	must(t, cgroup.RT(above.CPU).Write("0"))
}

// The same holds for a decision from before the reservation.
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
