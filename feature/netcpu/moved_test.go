package netcpu_test

import (
	"os"
	"path/filepath"
	"strconv"
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

// moving is a container under a flood that is about to be moved, and its owner's settings.
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
	other := h.create(sandbox.Spec{Name: "elsewhere", CPU: sandbox.CPU{Quota: quota, Period: period}, Network: h.box})
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
		if got := m.threads()["eth0"]; len(got) != 1 || got[0] != payer(c) {
			m.t.Errorf("%s: the thread of eth0 is in %q, want %s", when, got, payer(c))
		}
	case policy.NetCPUCharge:
		until(m.t, when+", the quota is lowered", func() bool { return m.lowered(c.Cgroup.CPU) })
	}
	from := m.accounts()
	until(m.t, when+", packets are charged to it", func() bool { return m.accounts()[c.ID] > from[c.ID]+10*time.Millisecond })
	m.addsUp(when)
}

var movedModes = []policy.NetCPU{policy.NetCPUIsolate, policy.NetCPUCharge}

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
			m.owners("in the end", two.Cgroup.CPU, two.Cgroup.CPU)
			if left := m.notes(); len(left) != 0 || len(m.threads()) != 0 {
				t.Errorf("in the end: threads %v, journal %+v", m.threads(), left)
			}
		})
	}
}

// If the cpu controller has a hierarchy of its own, a container can be moved in that alone, with
// the threads in it or without, and its cgroup can be renamed: it remains the same container.
func TestMovedInHierarchy(t *testing.T) {
	t.Parallel()
	for mode, kthreads := range map[policy.NetCPU]bool{policy.NetCPUIsolate: true, policy.NetCPUCharge: false} {
		t.Run(string(mode)+", with kernel threads "+strconv.FormatBool(kthreads), func(t *testing.T) {
			needOwnHierarchy(t)
			m := newMoving(t)
			c := m.container
			m.apply(c, mode)
			m.inForce("before", c, mode)
			was := c.Cgroup.CPU
			m.move(was, m.elsewhere.Cgroup.CPU, kthreads)
			c.Cgroup.CPU = m.elsewhere.Cgroup.CPU
			for range 2 { // the second time there is nothing to do
				m.apply(c, mode)
			}
			m.owners("moved away", was, was)
			m.inForce("moved", c, mode)
			until(t, "its cgroup can be removed", func() bool { return os.Remove(was) == nil })
			must(t, m.netcpu.Remove(t.Context(), c.ID))
			m.owners("in the end", c.Cgroup.CPU, c.Cgroup.CPU)
			if left := m.notes(); len(left) != 0 || len(m.threads()) != 0 {
				t.Errorf("in the end: threads %v, journal %+v", m.threads(), left)
			}
		})
	}
}

// A renamed cgroup keeps its changes, and the record of its owner's limit.
func TestRenamed(t *testing.T) {
	t.Parallel()
	for _, mode := range movedModes {
		t.Run(string(mode), func(t *testing.T) {
			needOwnHierarchy(t)
			m := newMoving(t)
			c := m.container
			m.apply(c, mode)
			m.inForce("before", c, mode)
			was := c.Cgroup.CPU
			c.Cgroup.CPU += "-renamed"
			must(t, os.Rename(was, c.Cgroup.CPU))
			t.Cleanup(func() { os.Rename(c.Cgroup.CPU, was) }) // for its removal
			time.Sleep(time.Second)                            // rounds before the rename is known
			for range 2 {
				m.apply(c, mode)
			}
			m.inForce("renamed", c, mode)
			for _, e := range m.notes() {
				if strings.Contains(e.Ref.Object+"/", was+"/") || e.Wrote == was {
					t.Errorf("the journal still has %+v", e)
				}
			}
			must(t, m.netcpu.Remove(t.Context(), c.ID))
			m.owners("in the end", c.Cgroup.CPU, was)
			if left := m.notes(); len(left) != 0 || len(m.threads()) != 0 {
				t.Errorf("in the end: threads %v, journal %+v", m.threads(), left)
			}
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
	for _, mode := range movedModes {
		t.Run(string(mode), func(t *testing.T) {
			h := newHost(t, sandbox.CPU{})
			other := h.create(sandbox.Spec{Name: "other"})
			h.Join(other, "10.66.0.3/24", h.ns, "h1")
			one, two := h.container, h.Describe(other)
			two.ID, two.Cgroup = one.ID, one.Cgroup
			two.Interfaces = []container.Interface{h.Veth(other, "eth0", h.ns, "h1")}
			before := h.state()
			h.apply(one, mode)
			for range 2 { // the second time there is nothing to do
				h.apply(two, mode)
			}
			moved := h.state()
			for _, name := range []string{"eth0 gro", "eth0 threaded", "eth0 rps", "h0 tso"} {
				if moved[name] != before[name] {
					t.Errorf("moved: %s is %q, want %q", name, moved[name], before[name])
				}
			}
			attached := func(box *sandbox.Box, device string) int {
				state, err := hook.Open("/proc", h.journal).Look(container.Device{NetNS: h.Open(box).Inode(), Index: h.Index(box, device)}, box.NetNS())
				must(t, err)
				return len(state.Egress)
			}
			if was, is := attached(h.ns, "h0"), attached(h.ns, "h1"); was != 0 || is != 1 {
				t.Errorf("moved: %d programs count what the first veth gets, and %d the second, want 0 and 1", was, is)
			}
			must(t, h.netcpu.Remove(t.Context(), two.ID))
			if left := h.notes(); len(left) != 0 || attached(h.ns, "h1") != 0 {
				t.Errorf("in the end: journal %+v", left)
			}
		})
	}
}
