package blockio

import (
	"encoding/json"
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
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/lab/sandbox/loop"
)

// A reservation of a disk that has not been measured is in force at once, and says how to
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
	if r := h.report().Reservations; len(r) != 1 || r[0].Admission != decide.AdmissionUnverified || r[0].Share != 0 || !strings.Contains(r[0].Advice, "calibrate") || verified() != 0 {
		t.Errorf("reserved: %+v", r)
	}
	d, err := block.Open("/sys", l.Path)
	must(t, err)
	at := decide.Disk{Major: d.Major, Minor: d.Minor}
	h.mu.Lock()
	h.learn([]monitor.Account{{Disk: at, Container: c.ID, Reads: 60, ReadBytes: 60 * decide.SmallRequest}}, time.Second)
	h.learn([]monitor.Account{{Disk: at, Reads: 1000}}, time.Millisecond) // too short to tell
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
	if !slices.Equal(again, []container.ID{c.ID}) {
		t.Errorf("to be applied again: %v, want %v", again, c.ID)
	}
	must(t, h.Apply(t.Context(), want))
	if r := h.report(); r.Reservations[0].Admission != decide.AdmissionVerified || r.Devices[0].Seen.ReadIOPS != 120 || verified() != 1 {
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
	if root.ReadIOPS != 5 || root.Headroom != 0.2 || !root.Measured || len(root.Realtime) != 1 || !strings.Contains(root.Basis(), "measure it again") {
		t.Errorf("root %+v, which is %s", root, root.Basis())
	}
	for _, id := range []string{"QEMU, wwid naa.1, 4096 bytes", "QEMU, wwid naa.2, 4096 bytes"} {
		if of, had := c.of[id]; had {
			t.Errorf("%s has %+v", id, of)
		}
	}
	must(t, c.set("new", decide.Capacity{BlockIOFigures: api.BlockIOFigures{ReadIOPS: 9, WriteIOPS: 9}, Depth1: api.BlockIOFigures{ReadIOPS: 2, WriteIOPS: 2}, Depth: 64}))
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
