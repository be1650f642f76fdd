package blockio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

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

var must = testkit.Must

func TestMain(m *testing.M) { testkit.Main(m) }

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e, Flags) }

func TestScripts(t *testing.T) { verbtest.Scripts(t, run) }

func TestNamedDisks(t *testing.T) {
	for _, tt := range []struct {
		in        []string
		want, err string
	}{
		{[]string{"log=/dev/vdc, data=/dev/vdb", "x-1=/dev/disk/by-id/y"}, "data=/dev/vdb,log=/dev/vdc,x-1=/dev/disk/by-id/y", ""},
		{[]string{"data"}, "", "not a device"},
		{[]string{"=/dev/vdb"}, "", "no name for a disk"},
		{[]string{"Data=/dev/vdb"}, "", "no name for a disk"},
		{[]string{"data=vdb"}, "", "not a device"},
		{[]string{"data=/dev/vdb", "data=/dev/vdc"}, "", "twice"},
		{[]string{"data=/dev/vdb,log=/dev/vdb"}, "", "twice"},
	} {
		verbtest.Given(t, namedDisks(new(map[string]string)), tt.in, tt.want, tt.err)
	}
}
