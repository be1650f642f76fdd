package blockio

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio/decide"
	"github.com/fairlead-project/fairlead/feature/blockio/monitor"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
)

// A reservation of an unmeasured disk is in force at once, and its status says how to verify it. What
// the disk was seen to do outlives the agent.
func TestUnverified(t *testing.T) {
	h := newHost(t)
	l := testkit.NewDisk(t, 4<<20)
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
	if r := h.report().Reservations; len(r) != 1 || r[0].Admission != decide.AdmissionUnverified || r[0].Share != 0 || !strings.Contains(r[0].Advice, "calibrate") || verified() != 0 {
		t.Errorf("reserved: %+v", r)
	}
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	at := decide.Disk{Major: d.Major, Minor: d.Minor}
	h.mu.Lock()
	h.learn([]monitor.Account{{Disk: at, Container: c.ID, Reads: 60, ReadBytes: 60 * decide.SmallRequest}}, time.Second)
	h.learn([]monitor.Account{{Disk: at, Reads: 1000}}, time.Millisecond) // too short
	h.mu.Unlock()
	says(h.Apply(t.Context(), want), "at most 60 reads")
	must(t, h.Close())
	h.open()
	says(h.Apply(t.Context(), want), "at most 60 reads")
	h.mu.Lock()
	h.learn([]monitor.Account{{Disk: at, Container: c.ID, Reads: 60, ReadBytes: 60 * decide.SmallRequest}, {Disk: at, Reads: 60, ReadBytes: 60 * decide.SmallRequest}}, time.Second)
	h.mu.Unlock()
	must(t, h.Apply(t.Context(), want))
	if r := h.report().Reservations; r[0].Admission != decide.AdmissionSeen || verified() != 0 {
		t.Errorf("reserved: %+v", r)
	}
	h.capacity(l.Path, 1000)
	var again []container.ID
	h.Notify(func(id container.ID) { again = append(again, id) })
	_, err = h.Decide(nil, true)
	must(t, err)
	testkit.Same(t, "to be applied again", []container.ID{c.ID}, again)
	must(t, h.Apply(t.Context(), want))
	if r := h.report(); r.Reservations[0].Admission != decide.AdmissionVerified || r.Devices[0].Seen.ReadIOPS != 120 || verified() != 1 {
		t.Errorf("reserved: %+v of %+v", r.Reservations, r.Devices)
	}
}

// A new agent reads what was recorded of disks. It rejects a file of another version.
func TestCapacitiesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "capacities.json")
	c, err := loadCapacities(path)
	must(t, err)
	must(t, c.set("new", decide.Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 9, WriteIOPS: 9}, Depth1: api.BlockIOFigures{ReadIOPS: 2, WriteIOPS: 2}, Depth: 64}))
	again, err := loadCapacities(path)
	must(t, err)
	testkit.Same(t, "of", c.of, again.of, cmp.AllowUnexported(decide.Capacity{}))
	must(t, os.WriteFile(path, []byte(`{"version": 3, "disks": {}}`), 0o600))
	testkit.Fails(t, "of another version", testkit.Err(loadCapacities(path)), "version 3")
}

// A reservation does not pass to another disk of the same model and size in the same place.
func TestLostToItsTwin(t *testing.T) {
	sys := t.TempDir()
	dir := filepath.Join(sys, "dev/block/8:0")
	must(t, os.MkdirAll(filepath.Join(dir, "mq"), 0o755))
	put := func(seq string) {
		for name, text := range map[string]string{"dev": "8:0", "size": "8", "diskseq": seq} {
			testkit.Write(t, filepath.Join(dir, name), text)
		}
	}
	put("4")
	d, err := block.Find(sys, 8, 0)
	must(t, err)
	f, err := New(Config{Host: feature.Host{Roots: kernel.Roots{Sys: sys, Proc: t.TempDir()}}})
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
