package traffic

import (
	"context"
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
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
		{[]string{"a/b=1gbit"}, "", "not a device name"},
		{[]string{"abcdefghijklmnop"}, "", "not a device name"},
		{[]string{"eth0=fast"}, "", "eth0: must start with a decimal number"},
		{[]string{"eth0=0"}, "", "the rate is 0"},
		{[]string{"eth0", "eth0=1gbit"}, "", "given twice"},
	} {
		u := uplinks(new(map[string]uint64))
		var err error
		for _, s := range tt.in {
			if err == nil {
				err = u.Set(s)
			}
		}
		if tt.err != "" {
			testkit.Fails(t, fmt.Sprint(tt.in), err, tt.err)
		} else if err != nil || u.String() != tt.want {
			t.Errorf("%q: %s, %v; want %s", tt.in, u.String(), err, tt.want)
		}
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
