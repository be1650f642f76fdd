package container

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestDocker(t *testing.T) {
	d := testkit.StartDocker(t, "--live-restore")
	s := runSet(t, Config{NSDirs: []string{d.NSDir}}, Docker(d.Host), CgroupTree("/proc", ""))
	d.Must(t, "run", "-d", "--name", "bridged", "--label", "fairlead.netcpu=isolate", d.Image, "sleep", "1000")
	c := awaitName(t, s, "bridged")
	t.Logf("%+v", c)
}
