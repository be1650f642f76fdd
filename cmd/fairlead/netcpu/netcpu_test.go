package netcpu

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

func TestDevices(t *testing.T) {
	verbtest.Given(t, devices(new(map[string]struct{})), []string{"eth1, eth0", "bond0"}, "bond0,eth0,eth1", "")
	verbtest.Given(t, devices(new(map[string]struct{})), []string{"../eth0"}, "", "not a device name")
	verbtest.Given(t, devices(new(map[string]struct{})), []string{"eth0=1gbit"}, "", "eth0 has no value")
}

// Watching prints again and again, and an interrupt is its ordinary end.
func TestNetCPUWatch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	defer verbtest.Serve(t, path, verbtest.Stub{Readings: map[string][]json.RawMessage{
		"netcpu": {json.RawMessage(`{"softirq_seconds": 1, "accounts": [{"container": "1", "name": "web", "tasks_seconds": 1}]}`)},
	}})()
	watching, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out := &countingWriter{text: "Packets took", after: 3, then: interrupt}
	var errs bytes.Buffer
	status := run(watching, cli.Env{Stdout: out, Stderr: &errs, Getenv: func(string) string { return "" }, Args: []string{"netcpu", "--watch", "--total", "--interval", "100ms", "--socket", path}})
	if status != cli.Done || errs.String() != "" || !strings.Contains(out.String(), "measured.\n\nCPU seconds since") {
		t.Errorf("status %d, %s\n%s", status, errs.String(), out.String())
	}
}

// countingWriter calls then when text has been written often enough.
type countingWriter struct {
	bytes.Buffer
	text  string
	after int
	then  func()
}

func (w *countingWriter) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if strings.Count(w.String(), w.text) >= w.after {
		w.then()
	}
	return n, err
}

// Whatever the numbers and names are, a table fits and drives no terminal.
func FuzzNetCPUTable(f *testing.F) {
	f.Add("web", 0.5, 1e-9, uint64(5), int64(2e9), false)
	f.Add(verbtest.Evil, 1e300, -1.0, ^uint64(0), int64(-1), true)
	f.Add("(system)", 0.0, 1e6, uint64(0), int64(0), true)
	f.Fuzz(func(t *testing.T, name string, x, y float64, packets uint64, span int64, total bool) {
		start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local)
		n := api.NetCPU{
			Since: start, Taken: start.Add(time.Duration(span)), Softirq: x, Charged: y,
			Accounts: []api.NetCPUAccount{{Container: 1, Name: name, Tasks: x, Receive: y, Stolen: x, Taken: y, Throttled: x, Periods: packets,
				StolenBy: []api.NetCPUCulprit{{Container: 2, Name: name, Seconds: x}},
				Work:     []api.NetCPUWork{{Direction: name, Protocol: name, Seconds: y, Packets: packets, Bytes: packets}}}},
			Matrix: []api.NetCPUTheft{{Kind: name, Culprit: 2, CulpritName: name, Seconds: x}, {Kind: api.VictimTask, Victim: 1, Culprit: 2, Seconds: y}},
		}
		for _, matrix := range []bool{false, true} {
			for _, detail := range []bool{false, true} {
				var out bytes.Buffer
				newNetcpuView(n, netcpuFlags{matrix: matrix, ReadingFlags: &verb.ReadingFlags{Total: total}}).print(&out, detail)
				if bytes.ContainsFunc(out.Bytes(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
					t.Errorf("control characters in %q", out.String())
				}
			}
		}
	})
}

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e, Flags) }

func TestScripts(t *testing.T) { verbtest.Scripts(t, run) }
