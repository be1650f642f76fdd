package blockio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
)

// calibrate --raw does not overwrite data: it refuses a device with a signature, and writes to any
// other only after its name was typed again.
func TestCalibrateRawRefuses(t *testing.T) {
	testkit.NeedRoot(t)
	disk := testkit.NewDisk(t, 1<<20)
	calibrate := []string{"io", "calibrate", disk.Path, "--raw", "--for", "100ms"}
	before, err := os.ReadFile(disk.Path)
	must(t, err)
	verbtest.Ended(t, cli.Failed, "Type "+disk.Path+" to go on", "nothing was written")(verbtest.Against(t, run, verbtest.Stub{}, calibrate...))
	copy(before[512:], "EFI PART")
	must(t, os.WriteFile(disk.Path, before, 0))
	for _, args := range [][]string{calibrate, append(calibrate, "--yes-destroy-data")} {
		verbtest.Ended(t, cli.Failed, "GPT partition table")(verbtest.Against(t, run, verbtest.Stub{}, args...))
	}
	if after, err := os.ReadFile(disk.Path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("written all the same: %v", err)
	}
	verbtest.Ended(t, cli.Usage)(verbtest.Against(t, run, verbtest.Stub{}, "io", "calibrate", disk.Path, "--scratch", "/", "--yes-destroy-data"))
}

func TestConfirm(t *testing.T) {
	for answer, want := range map[string]bool{"/dev/vdc\n": true, " /dev/vdc": true, "": false, "\n": false, "y\n": false, "vdc\n": false, "/dev/vdcc\n": false} {
		var asked bytes.Buffer
		err := confirm(t.Context(), verb.Env{Env: cli.Env{Stdin: strings.NewReader(answer), Stderr: &asked}}, "/dev/vdc", block.Disk{Name: "vdc", Size: 5})
		if (err == nil) != want {
			t.Errorf("%q: %v", answer, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	silent, closes := io.Pipe()
	defer closes.Close()
	if err := confirm(ctx, verb.Env{Env: cli.Env{Stdin: silent, Stderr: io.Discard}}, "/dev/vdc", block.Disk{}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

func FuzzParseFigures(f *testing.F) {
	testkit.Seeds(f, "", "riops=1", "riops=1 wiops=2 rbps=1mb wbps=5", "riops=0", "riops=-1", "riops=1 riops=2", "x=1", "riops", "rbps=99999999999999999999kb")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := parseFigures(strings.Fields(s))
		if err == nil && len(strings.Fields(s)) > 0 && got == (api.BlockIOFigures{}) {
			t.Fatalf("%q is nothing", s)
		}
	})
}

// blockioStub has one report, and events.
type blockioStub struct {
	serve.Backend
	report api.BlockIO
}

func (s *blockioStub) Report(ctx context.Context, ask api.Ask) (any, error) {
	if after, ok := ask.Body.(api.BlockIOEventsAfter); ok {
		if after > 0 {
			<-ctx.Done()
			return nil, errors.New("the backend is tired") // the last event
		}
		return s.report.Events, nil
	}
	return s.report, nil
}

func (s *blockioStub) Command(ctx context.Context, ask api.Ask) (any, error) {
	return s.Report(ctx, ask)
}

func TestBlockIO(t *testing.T) {
	at := time.Date(2026, 11, 22, 8, 0, 0, 0, time.Local)
	s := &blockioStub{report: api.BlockIO{
		Rows: []api.BlockIORow{
			{Container: 7, Name: "db\x1b", Disk: "vda", State: "interference", Reserved: &api.BlockIOFigures{ReadIOPS: 2000}, Achieved: api.BlockIOFigures{ReadIOPS: 900},
				Voluntary: 1500, Involuntary: 300, ICPU: 0.2, ICPUForeign: 0.15, ICPUOwn: 0.05, WaitForeign: 0.4, CPUPressure: 0.63, By: "batch"},
			{Container: 8, Name: "batch", Disk: "vda", State: "best effort", Action: "runs on idle CPUs only"},
		},
		Waits:      []api.BlockIOWait{{Victim: 7, Culprit: 8, Name: "batch", Share: 0.4}},
		Interrupts: []api.BlockIOInterrupts{{Source: "virtio0-req.0", Number: 26, CPUs: []float64{900, 0}}, {Source: "BLOCK", Soft: true, CPUs: []float64{900, 4}}},
		Events:     []api.BlockIOEvent{{ID: 1, Time: at, What: "interference", Name: "db", Disk: "vda", Text: "it waits"}},
		Stolen:     0.02,
	}}
	detail := []string{
		`"db\x1b"`, "2.00kr", "I_CPU", "1.50k", "0.20", "0.15", "0.05", "400ms", "63 %", "WHILE THERE RAN", "virtio0-req.0", "interrupt 26", "900 0", "softirq", "900 4", "20ms in each second",
	}
	verbtest.Ended(t, cli.Done, detail...)(verbtest.Against(t, run, s, "io", "-v"))
	verbtest.Ended(t, cli.Done, "2026-11-22 08:00:00", "interference", "it waits")(verbtest.Against(t, run, s, "io", "events"))
	if _, out, _ := verbtest.Against(t, run, s, "io"); strings.Contains(out, "WHILE THERE RAN") {
		t.Errorf("io shows the detail without being asked: %s", out)
	}
}

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e, Flags) }

func TestNamedDisks(t *testing.T) {
	for _, tt := range []struct {
		in   []string
		want string // "" is an error
	}{
		{[]string{"data=/dev/vdb"}, "data=/dev/vdb"},
		{[]string{"log=/dev/vdc, data=/dev/vdb", "x-1=/dev/disk/by-id/y"}, "data=/dev/vdb,log=/dev/vdc,x-1=/dev/disk/by-id/y"},
		{[]string{"data"}, ""},
		{[]string{"=/dev/vdb"}, ""},
		{[]string{"Data=/dev/vdb"}, ""},
		{[]string{"data=vdb"}, ""},
		{[]string{"data=/dev/vdb", "data=/dev/vdc"}, ""},
		{[]string{"data=/dev/vdb,log=/dev/vdb"}, ""},
	} {
		d := namedDisks(new(map[string]string))
		var err error
		for _, s := range tt.in {
			if err == nil {
				err = d.Set(s)
			}
		}
		if (err != nil) != (tt.want == "") || err == nil && d.String() != tt.want {
			t.Errorf("%q: %q, %v", tt.in, d.String(), err)
		}
	}
}
