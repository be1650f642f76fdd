package traffic

import (
	"context"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e, Flags) }

func TestScripts(t *testing.T) { verbtest.Scripts(t, run) }

func TestUplinks(t *testing.T) {
	for _, tt := range []struct {
		in        []string
		want, err string
	}{
		{[]string{"eth0"}, "eth0", ""},
		{[]string{"eth1=2.5gbit", "eth0=100mbit"}, "eth0=100mbit,eth1=2500mbit", ""},
		{[]string{"eth1, eth0=1gbit"}, "eth0=1gbit,eth1", ""},
		{[]string{""}, "", "not a device name"},
		{[]string{"eth0,"}, "", "not a device name"},
		{[]string{"../eth0=1gbit"}, "", "not a device name"},
		{[]string{"eth0:1"}, "", "not a device name"},
		{[]string{"abcdefghijklmnop"}, "", "not a device name"},
		{[]string{"eth0=fast"}, "", "eth0: must start with a decimal number"},
		{[]string{"eth0=0"}, "", "the rate is 0"},
		{[]string{"eth0,eth0"}, "", "given twice"},
		{[]string{"eth0", "eth0=1gbit"}, "", "given twice"},
	} {
		verbtest.Given(t, uplinks(new(map[string]uint64)), tt.in, tt.want, tt.err)
	}
}

func FuzzUplinks(f *testing.F) {
	f.Add("eth0=1gbit,eth1")
	f.Add("=,=")
	f.Fuzz(func(t *testing.T, s string) {
		u, again := uplinks(new(map[string]uint64)), uplinks(new(map[string]uint64))
		if u.Set(s) != nil {
			return
		}
		if err := again.Set(u.String()); err != nil || again.String() != u.String() {
			t.Errorf("%q: %s comes back as %s, %v", s, u.String(), again.String(), err)
		}
	})
}
