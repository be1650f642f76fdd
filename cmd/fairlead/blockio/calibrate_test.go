package blockio

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// figures measures all figures of a disk, fio ends with its context, and what fio reports as an
// error is one.
func TestFigures(t *testing.T) {
	testkit.NeedRoot(t)
	disk := testkit.NewDisk(t, 4<<20)
	file, err := os.OpenFile(disk.Path, os.O_RDWR, 0)
	must(t, err)
	defer file.Close()
	f, err := figures(t.Context(), file, 100*time.Millisecond)
	if err != nil || f.ReadIOPS == 0 || f.WriteIOPS == 0 || f.Depth1.ReadIOPS == 0 || f.Depth1.WriteIOPS == 0 ||
		f.Depth1.ReadIOPS > f.ReadIOPS || f.Depth1.WriteIOPS > f.WriteIOPS ||
		f.ReadBytes < f.ReadIOPS*smallRequest || f.WriteBytes < f.WriteIOPS*smallRequest || f.Depth < 1 || f.Depth > mostDepth {
		t.Errorf("%+v, %v", f, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	testkit.Is(t, "interrupted", testkit.Err(figures(ctx, file, time.Hour)), context.Canceled)
	if err := sched.TryDeadline(); err != nil {
		t.Logf("no budgets are measured here: %v", err)
	} else if n, err := (fio{size: smallRequest, depth: 2, budget: 20 * time.Millisecond}).run(t.Context(), file, 100*time.Millisecond); err != nil || n == 0 {
		t.Errorf("beside a budget: %v, %v", n, err)
	}
	if _, err := (fio{size: 8 << 20, depth: 1}).run(t.Context(), file, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "fio") {
		t.Errorf("requests of more than the disk: %v", err)
	}
}

// Without fio, calibrate says what to install, and writes nothing.
func TestCalibrateWithoutFio(t *testing.T) {
	testkit.NeedRoot(t)
	disk := testkit.NewDisk(t, 1<<20)
	t.Setenv("PATH", t.TempDir())
	if _, err := exec.LookPath("fio"); err == nil {
		t.Fatal("there is fio all the same")
	}
	says := verbtest.Ended(t, cli.Failed, "io calibrate needs fio: install the package fio")
	says(verbtest.Against(t, run, verbtest.Stub{}, "io", "calibrate", disk.Path, "--raw", "--yes-destroy-data"))
}

func TestFioReport(t *testing.T) {
	for _, x := range []struct {
		text  string
		write bool
		want  float64
		says  string
	}{
		{`{"jobs": [{"error": 0, "read": {"iops": 1234.5}, "write": {"iops": 0}}]}`, false, 1234.5, ""},
		{"note: both iodepth >= 1 and synchronous I/O engine\n" + `{"jobs": [{"read": {"iops": 0}, "write": {"iops": 7}}]}`, true, 7, ""},
		{`{"jobs": [{"read": {"iops": 7}}]}`, true, 0, "nothing was done"},
		{`{"jobs": [{"error": 5, "read": {"iops": 7}}]}`, false, 0, "input/output error"},
		{`{"jobs": []}`, false, 0, "0 jobs"},
		{`fio: unknown option`, false, 0, "report of fio"},
	} {
		got, err := fio{write: x.write}.parse([]byte(x.text))
		if got != x.want || (err == nil) != (x.says == "") || err != nil && !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: %v, %v; want %v, %q", x.text, got, err, x.want, x.says)
		}
	}
}

func FuzzFioReport(f *testing.F) {
	f.Add([]byte(`{"jobs": [{"error": 0, "read": {"iops": 1234.5}}]}`))
	f.Add([]byte("note\n{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if n, err := (fio{}).parse(data); (n > 0) == (err != nil) {
			t.Errorf("%v, %v", n, err)
		}
	})
}
