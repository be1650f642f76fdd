package views

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/record"
)

// offline runs a verb without an agent.
func offline(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return verbtest.Alone(t, run, append(args, "--config=", "--socket="+filepath.Join(t.TempDir(), "none"))...)
}

// incident records a minute in which the packets of one container take a quarter of the time of
// another, from second 20 to second 40, and returns the folder.
func incident(t *testing.T) (dir string, start time.Time) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "record")
	w, err := record.New(record.Config{Dir: dir})
	must(t, err)
	start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local)
	stolen := 0.0
	for s := 0; s <= 60; s += 5 {
		if s > 20 && s <= 40 {
			stolen += 1.25
		}
		f := api.Frame{Taken: start.Add(time.Duration(s) * time.Second), Containers: []api.Container{
			{ID: 1, Name: "db", Image: "registry.example.com/db:1"}, {ID: 2, Name: verbtest.Evil, Image: "registry.example.com/flood:1"},
		}}
		f.NetCPU = &api.NetCPU{Since: start, Taken: f.Taken, Accounts: []api.NetCPUAccount{
			{Container: 1, Name: "db", Tasks: 100 + float64(s), Stolen: stolen, StolenBy: []api.NetCPUCulprit{{Container: 2, Name: verbtest.Evil, Seconds: stolen}}},
			{Container: 2, Name: verbtest.Evil, Tasks: 100 + float64(s), Receive: stolen},
		}, Matrix: []api.NetCPUTheft{{Kind: api.VictimTask, Victim: 1, VictimName: "db", Culprit: 2, CulpritName: verbtest.Evil, Seconds: stolen}}}
		must(t, w.Write(f))
	}
	must(t, w.Close())
	return dir, start
}

func TestReport(t *testing.T) {
	dir, start := incident(t)
	status, out, errs := offline(t, "report", "--record-dir", dir, "-o", "json")
	var h api.History
	if err := json.Unmarshal([]byte(out), &h); status != cli.Done || err != nil {
		t.Fatalf("status %d, %v: %s", status, err, errs)
	}
	if len(h.Rows) != 2 || len(h.Moments) != 1 || h.Seconds != 60 {
		t.Fatalf("%+v", h)
	}
	m := h.Moments[0]
	if m.Name != "db" || !m.Since.Equal(start.Add(20*time.Second)) || !m.Taken.Equal(start.Add(40*time.Second)) || m.By[0].Culprit != 2 || m.By[0].Cause != api.SlowedByPackets || m.Slowed < 0.05 {
		t.Errorf("%+v", m)
	}
	for _, format := range []string{"table", "yaml", "html"} {
		status, out, errs := offline(t, "report", "--record-dir", dir, "-o", format)
		if status != cli.Done || !strings.Contains(out, "db") || strings.ContainsAny(out, "\x1b\u202e\u009b\x7f") {
			t.Errorf("-o %s: status %d, %s%q", format, status, errs, out)
		}
		if format != "yaml" && !strings.Contains(out, "12:00:20") {
			t.Errorf("-o %s does not say when it began:\n%s", format, out)
		}
	}
	// Only the quiet part.
	verbtest.Ended(t, cli.Done, "No container was slowed")(offline(t, "report", "--record-dir", dir, "--at", "2026-03-01 12:00:20", "--since", "1m"))
	verbtest.Ended(t, cli.Failed, "nothing was recorded in that time")(offline(t, "report", "--record-dir", dir, "--at", "2020-01-01 12:00"))
	verbtest.Ended(t, cli.Failed, "the agent makes it")(offline(t, "report", "--record-dir", dir+"/none"))
	verbtest.Ended(t, cli.Usage, "--at")(offline(t, "report", "--record-dir", dir, "--at", "soon"))
}

func TestRecordExport(t *testing.T) {
	dir, _ := incident(t)
	path := filepath.Join(t.TempDir(), "incident.rec")
	verbtest.Ended(t, cli.Done, "8 frames")(offline(t, "record", "export", path, "--record-dir", dir, "--since", "35s", "--anonymous"))
	status, out, errs := offline(t, "report", "--replay", path)
	if status != cli.Done || !strings.Contains(out, "packets of container-2") || strings.Contains(out, "db") {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	verbtest.Ended(t, cli.Failed, "exists")(offline(t, "record", "export", path, "--record-dir", dir))
	none := filepath.Join(t.TempDir(), "none.rec")
	status, _, errs = offline(t, "record", "export", none, "--record-dir", dir, "--at", "2020-01-01 12:00")
	if _, err := os.Stat(none); status != cli.Failed || err == nil {
		t.Errorf("nothing to export: status %d: %s; the file is there: %v", status, errs, err == nil)
	}
}

// recordingStub is an agent that records.
type recordingStub struct {
	serve.Backend
	status api.Status
}

func (s recordingStub) Status(context.Context) (api.Status, error) { return s.status, nil }

func TestRecordStatus(t *testing.T) {
	dir, _ := incident(t)
	s := recordingStub{status: api.Status{Started: time.Now().Add(-time.Minute), Recording: &api.Recording{Dir: dir, Frames: 10, CPU: 0.02}}}
	verbtest.Ended(t, cli.Done, "frames   13", "2.0 ms", "2026-03-01 12:01:00")(verbtest.Against(t, run, s, "record", "--record-dir", dir, "--config="))
	s.status.Recording.Error = "no space left\x1b"
	verbtest.Ended(t, cli.Done, `no space left\x1b`)(verbtest.Against(t, run, s, "record", "--record-dir", dir, "--config="))
	verbtest.Ended(t, cli.Done, `"frames": 13`)(offline(t, "record", "--record-dir", dir, "-o", "json"))
}
