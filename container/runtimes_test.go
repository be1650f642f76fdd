package container

import (
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestPodman(t *testing.T) {
	p := testkit.StartPodman(t)
	s := runSet(t, Config{}, Podman(p.Host), CgroupTree("/proc", ""))
	p.Must(t, "run", "-d", "--name", "flpod", "--cgroup-parent", "/"+p.CgroupParent, "--label", "fairlead.net.rate=5mbit", p.Image, "sleep", "1000")
	c := awaitName(t, s, "flpod")
	t.Logf("%+v", c)
}

func TestContainerd(t *testing.T) {
	d := testkit.StartContainerd(t)
	s := runSet(t, Config{}, Containerd(d.Socket))
	d.Import(t, "default")
	d.Start(t, "default", "flplain", "--label", "a=b")
	c := awaitName(t, s, "flplain")
	t.Logf("%+v", c)
}
