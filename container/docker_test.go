package container

import (
	"context"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// runSet runs a Set until t ends.
func runSet(t *testing.T, cfg Config, sources ...Source) *Set {
	t.Helper()
	s := NewSet(cfg, sources...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return s
}

// await waits until the Snapshot satisfies ok, and returns it.
func await(t *testing.T, s *Set, what string, ok func(Snapshot) bool) Snapshot {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		changed := s.Changed()
		snap := s.Snapshot()
		if ok(snap) {
			return snap
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("%s: not within 20 s; sources %+v, containers %+v", what, snap.Sources, snap.Containers)
		}
	}
}

func named(snap Snapshot, name string) (Container, bool) {
	for _, c := range snap.Containers {
		if c.Name == name {
			return c, true
		}
	}
	return Container{}, false
}

func awaitName(t *testing.T, s *Set, name string) Container {
	t.Helper()
	snap := await(t, s, "container "+name, func(snap Snapshot) bool { _, ok := named(snap, name); return ok })
	c, _ := named(snap, name)
	return c
}

func TestDocker(t *testing.T) {
	d := testkit.StartDocker(t, "--live-restore")
	s := runSet(t, Config{NSDirs: []string{d.NSDir}}, Docker(d.Host), CgroupTree("/proc", ""))
	d.Must(t, "run", "-d", "--name", "bridged", "--label", "fairlead.netcpu=isolate", d.Image, "sleep", "1000")
	c := awaitName(t, s, "bridged")
	t.Logf("%+v", c)
}
