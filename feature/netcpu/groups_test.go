package netcpu_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// moving is a container under a flood before its move, and its owner's settings.
type moving struct {
	*host
	elsewhere container.Container // the container is moved to its cgroups
	limits    map[string]limits
}

func newMoving(t *testing.T) *moving {
	const quota, period = 20 * time.Millisecond, 100 * time.Millisecond
	h := newHost(t, sandbox.CPU{})
	h.start(h.box, "udp-recv", "--listen", ":9000") // before the quota, with which it takes long
	must(t, h.box.Limit(sandbox.CPU{Quota: quota, Period: period}))
	other := h.Create(sandbox.Spec{Name: "elsewhere", CPU: sandbox.CPU{Quota: quota, Period: period}, Network: h.box})
	m := &moving{host: h, elsewhere: h.describe(other), limits: make(map[string]limits)}
	for _, dir := range []string{h.container.Cgroup.CPU, m.elsewhere.Cgroup.CPU} {
		m.limits[dir] = limitsOf(t, dir)
	}
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "20000")
	return m
}

// owners checks that a cgroup has its owner's settings.
func (m *moving) owners(when, dir, was string) {
	m.t.Helper()
	if got := limitsOf(m.t, dir); got != m.limits[was] {
		m.t.Errorf("%s: %s has %+v, its owner %+v", when, dir, got, m.limits[was])
	}
}

// ended checks that nothing is left of a mode.
func (m *moving) ended(dir, was string) {
	m.t.Helper()
	m.owners("in the end", dir, was)
	m.noThreads("in the end")
}

func (m *moving) lowered(dir string) bool {
	return limitsOf(m.t, dir).Quota < m.limits[m.elsewhere.Cgroup.CPU].Quota
}

// move moves the processes of a cgroup to another, with its kernel threads if kthreads is set.
func (m *moving) move(from, to string, kthreads bool) {
	m.t.Helper()
	text, err := os.ReadFile(filepath.Join(from, "cgroup.procs"))
	must(m.t, err)
	for _, pid := range strings.Fields(string(text)) {
		if _, err := os.Readlink("/proc/" + pid + "/exe"); err != nil && !kthreads {
			continue
		}
		must(m.t, os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(pid), 0))
	}
}

// inForce waits until a mode is in force in a cgroup, and packets are charged to a container.
func (m *moving) inForce(when string, c container.Container, mode policy.NetCPU) {
	m.t.Helper()
	switch mode {
	case policy.NetCPUIsolate:
		m.pays(when, c)
	case policy.NetCPUCharge:
		until(m.t, when+", the quota is lowered", func() bool { return m.lowered(c.Cgroup.CPU) })
	}
	from := m.cost(c)
	until(m.t, when+", packets are charged to it", func() bool { return m.cost(c) > from+10*time.Millisecond })
	m.addsUp(when)
}

// All processes of a container are moved to other cgroups, which makes it another container:
// everything that was changed for the first is undone, whichever of the two the agent sees first,
// and the second one pays from then on.
func TestMovedElsewhere(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	type change struct {
		mode  policy.NetCPU
		order string
	}
	for _, c := range testkit.Cases(t, 2,
		change{policy.NetCPUIsolate, "begin first"},
		change{policy.NetCPUCharge, "end first"},
	) {
		t.Run(string(c.mode)+", "+c.order, func(t *testing.T) {
			m := newMoving(t)
			one := m.container
			m.apply(one, c.mode)
			m.inForce("before", one, c.mode)
			e := m.elsewhere.Cgroup
			m.move(one.Cgroup.V2, e.V2, false)
			if one.Cgroup.CPU != one.Cgroup.V2 {
				m.move(one.Cgroup.CPU, e.CPU, false)
			}
			two := m.describe(m.box)
			if two.ID == one.ID || two.NetNS != one.NetNS {
				t.Fatalf("%+v and %+v, want two of one namespace", one, two)
			}
			if c.order == "end first" {
				must(t, m.netcpu.Remove(t.Context(), one.ID))
				m.apply(two, c.mode)
			} else {
				m.apply(two, c.mode)
				must(t, m.netcpu.Remove(t.Context(), one.ID))
			}
			m.owners("moved away", one.Cgroup.CPU, one.Cgroup.CPU)
			m.inForce("moved", two, c.mode)
			// An empty cgroup can be removed.
			until(t, "its cgroup can be removed", func() bool { return os.Remove(one.Cgroup.CPU) == nil })
			must(t, m.netcpu.Remove(t.Context(), two.ID))
			m.ended(two.Cgroup.CPU, two.Cgroup.CPU)
		})
	}
}

// If the cpu controller has a separate hierarchy, a container can be moved in that alone, with or
// without the threads in it, and its cgroup can be renamed. It remains the same container, with
// its changes and the record of its owner's limit.
func TestMovedInHierarchy(t *testing.T) {
	t.Parallel()
	for mode, kthreads := range map[policy.NetCPU]bool{policy.NetCPUIsolate: true, policy.NetCPUCharge: false} {
		t.Run(string(mode), func(t *testing.T) {
			needOwnHierarchy(t)
			m := newMoving(t)
			c := m.container
			m.apply(c, mode)
			m.inForce("before", c, mode)
			was, to := c.Cgroup.CPU, m.elsewhere.Cgroup.CPU
			m.move(was, to, kthreads)
			c.Cgroup.CPU = to
			for range 2 { // the second time there is nothing to do
				m.apply(c, mode)
			}
			m.owners("moved away", was, was)
			m.inForce("moved", c, mode)
			until(t, "its cgroup can be removed", func() bool { return os.Remove(was) == nil })

			c.Cgroup.CPU += "-renamed"
			must(t, os.Rename(to, c.Cgroup.CPU))
			t.Cleanup(func() { os.Rename(c.Cgroup.CPU, to) }) // for its removal
			from := m.cost(c)
			until(t, "its packets cost something before the rename is known", func() bool { return m.cost(c) > from+50*time.Millisecond })
			for range 2 {
				m.apply(c, mode)
			}
			m.inForce("renamed", c, mode)
			for _, e := range m.notes() {
				if strings.Contains(e.Ref.Object+"/", to+"/") || e.Wrote == to {
					t.Errorf("the journal still has %+v", e)
				}
			}
			must(t, m.netcpu.Remove(t.Context(), c.ID))
			m.ended(c.Cgroup.CPU, to)
		})
	}
}

// needOwnHierarchy skips a test if all controllers share one hierarchy.
func needOwnHierarchy(t *testing.T) {
	t.Helper()
	testkit.NeedRoot(t)
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	if layout.CPU == layout.V2 {
		testkit.Skip(t, "the cpu controller has no hierarchy of its own")
	}
}

// A container that moves to another network namespace leaves nothing behind in the first one, and
// pays for the packets of the second.
func TestMovedToAnotherNetwork(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	_, two := h.join("other", 3)
	one := h.container
	two.ID, two.Cgroup = one.ID, one.Cgroup
	before := h.state()
	attached := func(box *sandbox.Box, device string) int {
		state, err := hook.Open("/proc", h.journal).Look(container.Device{NetNS: h.Open(box).Inode(), Index: h.Index(box, device)}, box.NetNS())
		must(t, err)
		return len(state.Egress)
	}
	for _, mode := range []policy.NetCPU{policy.NetCPUIsolate, policy.NetCPUCharge} {
		h.apply(one, mode)
		for range 2 { // the second time there is nothing to do
			h.apply(two, mode)
		}
		moved := h.state()
		for _, name := range []string{"eth0 gro", "eth0 threaded", "eth0 rps", "h0 tso"} {
			if moved[name] != before[name] {
				t.Errorf("%s, moved: %s is %q, want %q", mode, name, moved[name], before[name])
			}
		}
		if was, is := attached(h.ns, "h0"), attached(h.ns, "h3"); was != 0 || is != 1 {
			t.Errorf("%s, moved: %d programs count what the first veth gets, and %d the second, want 0 and 1", mode, was, is)
		}
		must(t, h.netcpu.Remove(t.Context(), two.ID))
		if left := h.notes(); len(left) != 0 || attached(h.ns, "h3") != 0 {
			t.Errorf("%s, in the end: journal %+v", mode, left)
		}
	}
}
