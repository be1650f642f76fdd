package knobs

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// childEnv makes this test binary an agent. Its value is "SEED STATE DISK V2 CPU IO". The agent
// changes the policy of a container in these cgroups at random until it is killed.
const childEnv = "FAIRLEAD_TEST_KNOBS"

// onKernel returns a host with cgroups of the kernel.
func onKernel(state string, cg container.Cgroup) (*host, error) {
	layout, err := cgroup.Detect("/proc", cgroup.DefaultRoot)
	return &host{
		roots: kernel.Default(), state: state, v2: layout.CPU == layout.V2, layout: layout, on: make(map[string]key),
		c: container.Container{ID: 7, Name: "web", Cgroup: cg},
	}, err
}

func child(args string) error {
	f := strings.Fields(args)
	seed, err := strconv.ParseUint(f[0], 10, 64)
	if err != nil {
		return err
	}
	h, err := onKernel(f[1], container.Cgroup{V2: f[3], CPU: f[4], IO: f[5]})
	if err == nil {
		err = h.open()
	}
	if err != nil {
		return err
	}
	r, all := rand.New(rand.NewPCG(seed, 1)), keys(f[2])
	fmt.Println("go")
	for {
		k := all[r.IntN(len(all))]
		if r.IntN(4) == 0 {
			k = key{feature: k.feature}
		}
		if err := h.apply(k); err != nil {
			return err
		}
	}
}

// TestKilled kills an agent that changes policy at random, at any moment. It also kills the next
// agent, which continues from what it finds. Then everything is restored.
func TestKilled(t *testing.T) {
	testkit.InFull(t)
	disk, cg := aDisk(t), testkit.Cgroup(t)
	if cg.V2 == "" || cg.CPU == "" || cg.IO == "" {
		testkit.Skip(t, "no cgroup v2 tree, or no controller of CPUs or of block I/O")
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	h, err := onKernel(t.TempDir(), container.Cgroup{V2: cg.V2, CPU: cg.CPU, IO: cg.IO})
	must(t, err)
	for n := range testkit.Scale(t, 30, 100) {
		must(t, set(h.c.Cgroup, owners(h.v2, disk.Number())[r.IntN(2)]))
		was := h.files(t)
		for range 1 + r.IntN(2) {
			_, kill := testkit.Again(t, fmt.Sprintf("%s=%d %s /dev/%s %s %s %s", childEnv, r.Uint64(), h.state, disk.Name, cg.V2, cg.CPU, cg.IO))
			time.Sleep(time.Duration(r.IntN(10_000)) * time.Microsecond)
			kill()
		}
		must(t, h.open())
		if n%2 == 0 {
			_, err := h.journal.Restore(kernel.Opener(h.roots), nil)
			must(t, err)
		} else {
			for _, feature := range []string{"blockio", "netcpu"} {
				must(t, h.apply(key{feature: feature}))
			}
		}
		h.same(t, fmt.Sprintf("seed %d, life %d", seed, n), was)
		must(t, h.journal.Close())
	}
	must(t, set(h.c.Cgroup, owners(h.v2, disk.Number())[0]))
}

// set writes what the owner of the cgroups has set, where the kernel has that file.
func set(cg container.Cgroup, files map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path, text := filepath.Join(dirOf(cg, name), name), files[name]
		if _, err := os.Stat(path); err != nil || text == "" || strings.HasPrefix(name, "cpu.rt_") {
			continue
		}
		if err := cgroup.File(path).Write(text); err != nil {
			return err
		}
	}
	return nil
}
