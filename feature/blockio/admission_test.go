package blockio

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
)

// A reservation of a disk whose capacity is not known is admitted, and what is said of it
// follows from what the disk was seen to do.
func TestAdmission(t *testing.T) {
	reads := func(n uint64) api.BlockIOFigures { return api.BlockIOFigures{ReadIOPS: n} }
	short := limit{did: reads(700), depth: 9.26, taken: second(1)}
	for _, x := range []struct {
		name     string
		c        Capacity
		own, all api.BlockIOFigures
		limit    limit
		how      string
		says     []string // nil: nothing
	}{
		{"never used", Capacity{}, reads(500), reads(1000), limit{}, admissionUnverified, []string{"1000 reads a second are reserved", "nothing yet", "`fairlead io calibrate /dev/vdb --scratch DIR`"}},
		{"seen less", Capacity{Seen: reads(900)}, reads(500), reads(1000), limit{}, admissionUnverified, []string{"at most 900 reads a second at once"}},
		{"seen as much", Capacity{Seen: reads(1000)}, reads(500), reads(1000), limit{}, admissionSeen, []string{"as much", "calibrate"}},
		{"seen in one direction only", Capacity{Seen: reads(1000)}, reads(1), api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1}, limit{}, admissionUnverified, nil},
		{"short while nobody was in the way", Capacity{Seen: reads(1000)}, reads(1000), reads(1000), short, admissionUnverified, []string{"nobody was in the way", "700 reads", "9.3 requests"}},
		{"known", Capacity{BlockIOFigures: reads(1000)}, reads(500), reads(1000), short, admissionVerified, []string{}},
		{"known to be less", Capacity{BlockIOFigures: reads(1000), Headroom: 0.1}, reads(500), reads(1000), limit{}, admissionExceeded, []string{"100% of what /dev/vdb", "90% can be"}},
		{"known, in one request at a time", Capacity{BlockIOFigures: reads(1000), Depth1: reads(500)}, reads(500), reads(1000), limit{}, admissionVerified, []string{}},
		{"known, in more than that", Capacity{BlockIOFigures: reads(1000), Depth1: reads(500)}, reads(501), reads(501), limit{}, admissionVerified, []string{"at least 2 requests", "500 reads"}},
	} {
		a := x.c.admit("/dev/vdb", x.own, x.all, x.limit)
		if a.How != x.how || x.says != nil && len(x.says) == 0 && a.Text != "" {
			t.Errorf("%s: %+v, want %s %q", x.name, a, x.how, x.says)
		}
		for _, w := range x.says {
			if !strings.Contains(a.Text, w) {
				t.Errorf("%s: %q, want %q", x.name, a.Text, w)
			}
		}
	}
}

// What is compared where nothing is known is what was seen or is reserved, never zero.
func TestOrAssumed(t *testing.T) {
	seen := api.BlockIOFigures{ReadIOPS: 2000, ReadBytes: 100 << 20}
	c := Capacity{Seen: seen}.OrAssumed(api.BlockIOFigures{ReadIOPS: 500, WriteBytes: 1 << 30})
	if c.Known() || c.ReadIOPS != 2000 || c.ReadBytes != 100<<20 || c.WriteBytes != 1<<30 || c.WriteIOPS != 8192 {
		t.Errorf("assumed %+v", c)
	}
	if err := c.check(); err != nil {
		t.Error(err)
	}
	if err := (Capacity{}).OrAssumed(api.BlockIOFigures{}).check(); err != nil {
		t.Errorf("of nothing: %v", err)
	}
	known := Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 1, WriteIOPS: 1}, Seen: seen}
	if got := known.OrAssumed(seen); got.BlockIOFigures != known.BlockIOFigures || !got.Known() {
		t.Errorf("of what is known: %+v", got)
	}
}

// The most of each is kept, and a file is written for it in steps only.
func TestSee(t *testing.T) {
	var c Capacity
	writes := 0
	for n := uint64(1); n <= 100_000; n++ {
		if c.see(api.BlockIOFigures{ReadIOPS: n, WriteBytes: 5}) {
			writes++
		}
	}
	if c.see(api.BlockIOFigures{ReadIOPS: 7}) || c.Seen != (api.BlockIOFigures{ReadIOPS: 100_000, WriteBytes: 5}) {
		t.Errorf("seen %+v", c.Seen)
	}
	if most := 8 * 17; writes > most {
		t.Errorf("to be written %d times, more than %d", writes, most)
	}
	c.see(api.BlockIOFigures{ReadIOPS: 1 << 62, ReadBytes: 1 << 62})
	if err := c.check(); err != nil {
		t.Errorf("what was seen cannot be read again: %v", err)
	}
}

// unmeasured is a window at a disk whose capacity nobody measured.
func unmeasured(at int, change func(*Demand, map[container.ID]Neighbour)) Window {
	w := window(at, change)
	w.Capacity[disk] = Capacity{Seen: api.BlockIOFigures{ReadIOPS: 5000}}.OrAssumed(api.BlockIOFigures{ReadIOPS: 1000})
	return w
}

// Measuring, judging and acting need no capacity.
func TestStandingUnmeasured(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*Demand, map[container.ID]Neighbour)
		state   string
		culprit container.ID
		acts    container.ID
	}{
		{"met", nil, stateMet, 0, 0},
		{"burner", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Waited[burner] = 600 * ms }, stateContended, burner, burner},
		{"the disk", func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under = 900 * ms
			ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: 4700, ReadBytes: 4700 * smallRequest}
		}, stateContended, hog, hog},
		{"burners come first, as nobody knows whether the disk is full", func(d *Demand, ns map[container.ID]Neighbour) {
			slow(d)
			d.Under, d.Waited[burner] = 900*ms, 600*ms
			ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: 4700, ReadBytes: 4700 * smallRequest}
		}, stateContended, burner, burner},
		{"nobody", func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Under = 900 * ms }, stateShort, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var control Control
			control.Next(unmeasured(0, nil))
			control.Next(unmeasured(1, c.change))
			s := control.standing[Place{victim, disk}]
			if s.State != c.state || s.Culprit != c.culprit {
				t.Errorf("%+v, want %s by %v", s, c.state, c.culprit)
			}
			var acts []container.ID
			if c.acts != 0 {
				acts = []container.ID{c.acts}
			}
			if got := slices.Sorted(maps.Keys(control.Actions())); !slices.Equal(got, acts) {
				t.Errorf("acts on %v, want %v", got, acts)
			}
		})
	}
}

// Who has one request under way at a time, and gets what the disk does of these, is in
// nobody's way and has nobody in its own.
func TestOneAtATime(t *testing.T) {
	for _, x := range []struct {
		name  string
		under time.Duration
		reads uint64
		state string
	}{
		{"one at a time", 900 * ms, 500, stateShort},
		{"one at a time, and less than the disk does of these", 900 * ms, 300, stateContended},
		{"two at a time", 1900 * ms, 500, stateContended},
	} {
		w := window(1, func(d *Demand, ns map[container.ID]Neighbour) {
			d.Achieved, d.Under = api.BlockIOFigures{ReadIOPS: x.reads, ReadBytes: x.reads * smallRequest}, x.under
			d.Waited[burner] = 300 * ms
			ns[hog].IO[disk] = api.BlockIOFigures{ReadIOPS: 5000}
		})
		c := w.Capacity[disk]
		c.Depth1 = api.BlockIOFigures{ReadIOPS: 500, WriteIOPS: 400}
		w.Capacity[disk] = c
		var control Control
		control.Next(window(0, nil))
		control.Next(w)
		s := control.standing[Place{victim, disk}]
		if s.State != x.state || x.state == stateShort && !strings.Contains(s.Evidence, "one request under way at a time") {
			t.Errorf("%s: %+v, want %s", x.name, s, x.state)
		}
	}
}

// What a disk does while its reservations are missed and nobody is in the way is told, until
// it does more.
func TestLimit(t *testing.T) {
	f := &BlockIO{limits: make(map[monitor.Disk]limit), members: map[container.ID]*member{
		victim: {reserved: []reservation{{disk: block.Disk{Major: disk.Major, Minor: disk.Minor}, figures: api.BlockIOFigures{ReadIOPS: 1000}}}},
	}}
	judge := func(at int, change func(*Demand, map[container.ID]Neighbour)) limit {
		w := unmeasured(at, change)
		f.control.Next(w)
		f.limit(w)
		return f.limits[disk]
	}
	judge(0, nil)
	if l := judge(1, func(d *Demand, _ map[container.ID]Neighbour) {
		slow(d)
		d.Waited[burner] = 600 * ms
		d.Under = 900 * ms
	}); !l.taken.IsZero() {
		t.Errorf("somebody was in the way: %+v", l)
	}
	if l := judge(2, func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Under = 100 * ms }); !l.taken.IsZero() {
		t.Errorf("it did not ask for more: %+v", l)
	}
	if l := judge(3, func(d *Demand, _ map[container.ID]Neighbour) { slow(d); d.Under = 4000 * ms }); l.did.ReadIOPS != 300 || l.depth != 4 {
		t.Errorf("short: %+v", l)
	}
	if l := judge(4, func(d *Demand, _ map[container.ID]Neighbour) { d.Achieved = api.BlockIOFigures{} }); l.taken.IsZero() {
		t.Error("forgotten, though it asks for nothing now")
	}
	if l := judge(5, nil); !l.taken.IsZero() {
		t.Errorf("still told, though it is met: %+v", l)
	}
}

// A reservation of a disk that nobody has measured is in force at once, and says how to
// verify it; what the disk was seen to do outlives the agent.
func TestUnverified(t *testing.T) {
	h := newHost(t)
	l, err := loop.New(t.TempDir(), 4<<20)
	must(t, err)
	t.Cleanup(func() { must(t, l.Close()) })
	c, _ := h.container("a")
	want := target(t, c, "io.reserve: "+l.Path+" riops=100")
	says := func(err error, words ...string) {
		t.Helper()
		if !errors.Is(err, feature.ErrPartly) {
			t.Fatalf("%v, want %v", err, feature.ErrPartly)
		}
		for _, w := range append(words, "unverified", "`fairlead io calibrate "+l.Path+" --scratch DIR`") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%v, want %q", err, w)
			}
		}
	}
	says(h.Apply(t.Context(), want), "nothing yet")
	if h.meter == nil {
		t.Error("nothing is measured")
	}
	verified := func() float64 {
		t.Helper()
		for _, s := range h.Snapshot().Samples {
			if s.Name == "blockio_reservation_verified" && s.Container == c.ID {
				return s.Value
			}
		}
		t.Fatal("no sample")
		return 0
	}
	if r := h.report().Reservations; len(r) != 1 || r[0].Admission != admissionUnverified || r[0].Share != 0 || !strings.Contains(r[0].Advice, "calibrate") || verified() != 0 {
		t.Errorf("reserved: %+v", r)
	}
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	at := monitor.Disk{Major: d.Major, Minor: d.Minor}
	h.mu.Lock()
	h.learn([]monitor.Account{{Disk: at, Container: c.ID, Reads: 60, ReadBytes: 60 * smallRequest}}, time.Second)
	h.learn([]monitor.Account{{Disk: at, Reads: 1000}}, time.Millisecond) // too short to tell
	h.mu.Unlock()
	says(h.Apply(t.Context(), want), "at most 60 reads")
	must(t, h.Close())
	h.open()
	says(h.Apply(t.Context(), want), "at most 60 reads")
	h.mu.Lock()
	h.learn([]monitor.Account{{Disk: at, Container: c.ID, Reads: 60, ReadBytes: 60 * smallRequest}, {Disk: at, Reads: 60, ReadBytes: 60 * smallRequest}}, time.Second)
	h.mu.Unlock()
	must(t, h.Apply(t.Context(), want))
	if r := h.report().Reservations; r[0].Admission != admissionSeen || verified() != 0 {
		t.Errorf("reserved: %+v", r)
	}
	h.capacity(l.Path, 1000)
	var again []container.ID
	h.Notify(func(id container.ID) { again = append(again, id) })
	_, err = h.Decide(nil, true)
	must(t, err)
	if !slices.Equal(again, []container.ID{c.ID}) {
		t.Errorf("to be applied again: %v, want %v", again, c.ID)
	}
	must(t, h.Apply(t.Context(), want))
	if r := h.report(); r.Reservations[0].Admission != admissionVerified || r.Devices[0].Seen.ReadIOPS != 120 || verified() != 1 {
		t.Errorf("reserved: %+v of %+v", r.Reservations, r.Devices)
	}
}

// The file of an earlier release is read, and each entry goes to the one disk that it can be
// of. Of disks that share a former identity none has it, and the rest is not lost for that.
func TestCapacitiesOfEarlierRelease(t *testing.T) {
	sys := t.TempDir()
	for name, text := range map[string]string{
		"vda/serial": "root", "sda/device/model": "QEMU", "sda/device/wwid": "naa.1", "sdb/device/model": "QEMU", "sdb/device/wwid": "naa.2",
	} {
		path := filepath.Join(sys, "block", name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	for i, name := range []string{"vda", "sda", "sdb"} {
		dir := filepath.Join(sys, "block", name)
		must(t, os.MkdirAll(filepath.Join(dir, "mq"), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, "dev"), fmt.Appendf(nil, "8:%d", i), 0o644))
		must(t, os.WriteFile(filepath.Join(dir, "size"), []byte("8"), 0o644))
	}
	path := filepath.Join(t.TempDir(), "capacities.json")
	must(t, os.WriteFile(path, []byte(`{
		"root, 4096 bytes": {"read_iops": 5, "write_iops": 6, "Headroom": 0.2, "Measured": true, "Realtime": [{"budget_seconds": 0.1, "read_iops": 3, "write_iops": 3}]},
		"QEMU, 4096 bytes": {"read_iops": 7, "write_iops": 7, "Headroom": 0.1, "Measured": false},
		"GONE, 1 bytes": {"read_iops": 8, "write_iops": 8, "Headroom": 0.1, "Measured": false}
	}`), 0o600))
	c, err := loadCapacities(path, sys)
	if err == nil || !strings.Contains(err.Error(), "/dev/sda, /dev/sdb") {
		t.Errorf("two disks of one identity: %v", err)
	}
	root := c.of["root, serial root, 4096 bytes"]
	if root.ReadIOPS != 5 || root.Headroom != 0.2 || !root.Measured || len(root.Realtime) != 1 || !strings.Contains(root.basis(), "measure it again") {
		t.Errorf("root %+v, which is %s", root, root.basis())
	}
	for _, id := range []string{"QEMU, wwid naa.1, 4096 bytes", "QEMU, wwid naa.2, 4096 bytes"} {
		if of, had := c.of[id]; had {
			t.Errorf("%s has %+v", id, of)
		}
	}
	must(t, c.set("new", Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 9, WriteIOPS: 9}, Depth1: api.BlockIOFigures{ReadIOPS: 2, WriteIOPS: 2}, Depth: 64}))
	again, err := loadCapacities(path, sys)
	must(t, err)
	if len(again.of) != 4 || again.of["new"].Depth1.ReadIOPS != 2 || again.of["GONE, 1 bytes"].ReadIOPS != 8 {
		data, _ := json.Marshal(again.of)
		t.Errorf("read again: %s", data)
	}
	must(t, os.WriteFile(path, []byte(`{"version": 3, "disks": {}}`), 0o600))
	if _, err := loadCapacities(path, sys); err == nil || !strings.Contains(err.Error(), "version 3") {
		t.Errorf("of a later release: %v", err)
	}
}

// Another disk of the same model and size in the same place is not the one that was reserved.
func TestLostToItsTwin(t *testing.T) {
	sys := t.TempDir()
	dir := filepath.Join(sys, "dev/block/8:0")
	must(t, os.MkdirAll(filepath.Join(dir, "mq"), 0o755))
	put := func(seq string) {
		for name, text := range map[string]string{"dev": "8:0", "size": "8", "diskseq": seq} {
			must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
		}
	}
	put("4")
	d, err := block.Find(sys, 8, 0)
	must(t, err)
	f, err := New(Config{Roots: kernel.Roots{Sys: sys, Proc: t.TempDir()}})
	must(t, err)
	if f.lost(reservation{disk: d}) {
		t.Error("lost, though nothing has changed")
	}
	put("5")
	if !f.lost(reservation{disk: d}) {
		t.Error("its twin is taken for it")
	}
	must(t, f.Close())
}
