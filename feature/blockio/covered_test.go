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

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/mountinfo"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
	"github.com/fairlead-project/fairlead/policy"
)

// On cgroup v1 buffered writes pass a cap, and so does whatever is in a cgroup below that
// of the container: that is no cap that holds. Reads of the container's own are capped.
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

// On cgroup v2 it depends on the file systems that the container sees of the disk.
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
		if strings.Join(got, " ") != x.want {
			t.Errorf("%q: %q, want %q", x.mounts, got, x.want)
		}
	}
}

// All that does not hold is said, and not the first alone.
func TestCoverSaysAll(t *testing.T) {
	h := newHost(t)
	l := h.disk(1000)
	c, cg := h.container("batch")
	if cg.IO == cg.V2 {
		return // TestThrottleCovered says it of the other kind of host
	}
	err := h.Apply(t.Context(), target(t, c, "io.max: "+l.Path+" wiops=5", "io.weight: 50"))
	mustSayPartly(t, err, true, "io.weight 50")
	mustSayPartly(t, err, true, "io.max: buffered writes")
}

// The quota that held a container back the most is that of its own cgroup or of one above.
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

// A reservation that is missed is in force in part only: the status says why and what would
// mend it, and is brought up to date when that changes, but not each second.
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

// A cap holds at the disk to which its name leads, also after that has changed, and after the disk
// was away.
func TestNameMoves(t *testing.T) {
	h := newHost(t)
	var told []container.ID
	h.Notify(func(id container.ID) { told = append(told, id) })
	both := []*loop.Disk{h.disk(1000), h.disk(1000)}
	dir, err := os.MkdirTemp("/dev", "fl-test-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	node := filepath.Join(dir, "data")
	lead := func(to string) {
		t.Helper()
		os.Remove(node)
		if to != "" {
			must(t, os.Symlink(to, node))
		}
	}
	c, cg := h.container("batch")
	targets := []policy.Target{target(t, c, "io.max: "+node+" wiops=70")}
	for _, step := range []struct {
		what string
		at   int // -1: nowhere
	}{{"at first", 0}, {"another disk", 1}, {"gone", -1}, {"back", 1}} {
		lead("")
		if step.at >= 0 {
			lead(both[step.at].Path)
		}
		told = nil
		_, err := h.Decide(targets, true)
		must(t, err)
		if moved := len(told) == 1; moved != (step.what != "at first") {
			t.Errorf("%s: another Apply is asked for: %v", step.what, told)
		}
		if err := h.Apply(t.Context(), targets[0]); (step.at < 0) != errors.Is(err, block.ErrNoDevice) {
			t.Errorf("%s: %v", step.what, err)
		}
		told = nil
		_, err = h.Decide(targets, true)
		must(t, err)
		testkit.Same(t, step.what+": and again", 0, len(told))
		for i, d := range both {
			if got, _ := throttle(t, cg, d, cgroup.Limits{}); step.at >= 0 && (got != "") != (i == step.at) {
				t.Errorf("%s: disk %d is capped %q", step.what, i, got)
			}
		}
	}
	must(t, h.Remove(t.Context(), c.ID))
}
