package e2e

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// testDockerEnds has an engine that ends its containers when it comes back.
func (h *host) testDockerEnds(t *testing.T) {
	defer h.with(t)()
	h.Kill()
	h.Without("--live-restore")
	h.Start(t)
	// As process 1 it would ignore the stop signal, and the engine would wait.
	h.sleeper(t, "taken", "--label", isolate, "--stop-signal", "KILL")
	before := h.agent.isolated("taken", 1)
	h.Kill()
	h.Start(t)
	h.agent.forgets(before)
	h.Must(t, "start", "taken")
	after := h.agent.isolated("taken", 1)
	h.remove(t, "taken")
	h.agent.forgets(after)
	h.agent.rests()
}

// testAgentKilled kills the agent, and ends a container while no agent runs. A thread in its cgroup
// may keep the engine from removing that, but only until an agent runs again.
func (h *host) testAgentKilled(t *testing.T) {
	defer h.with(t)()
	h.sleeper(t, "orphan", "--label", isolate)
	h.sleeper(t, "heir", "--label", isolate)
	orphan, heir := h.agent.isolated("orphan", 1), h.agent.isolated("heir", 1)
	queue := func() string {
		x, err := h.agent.api.Explain(t.Context(), "orphan")
		must(t, err)
		for _, c := range x.Host {
			if c.Kind == "kthread" {
				return c.Now
			}
		}
		return ""
	}
	// All packets from the uplink are for one container, so its cgroup gets the thread of the
	// uplink, too.
	stop := h.flood(t, strings.Split(orphan.Interfaces[0].Addrs[0], "/")[0])
	err := within(20*time.Second, func() error {
		if in := queue(); in != orphan.Cgroup.CPU {
			return fmt.Errorf("the thread of the uplink is in %s", in)
		}
		return nil
	})
	t.Logf("uplink's thread given to the container before the kill: %v", err == nil)
	h.agent.kill()
	stop()
	h.remove(t, "orphan")
	h.start()
	await(t, "the cgroups of the container that ended without the agent to go", func() error {
		for _, dir := range h.cgroups() {
			if strings.Contains(dir, orphan.RuntimeID) {
				return fmt.Errorf("%s is left", dir)
			}
		}
		return nil
	})
	again := h.agent.isolated("heir", 1)
	if !slices.Equal(again.threads, heir.threads) {
		t.Errorf("heir has threads %v, had %v", again.threads, heir.threads)
	}
	h.remove(t, "heir")
	h.agent.forgets(heir)
	h.atStart = footprint{}
	await(t, "nothing to be in force", func() error {
		if n := h.agent.status().Changes; n != 0 {
			return fmt.Errorf("%d changes", n)
		}
		return nil
	})
	h.atStart = h.agent.footprint()
	h.agent.idles(h.atStart)
}

// flood sends some thousand packets a second to an address, by the uplink.
func (h *host) flood(t *testing.T, to string) (stop func()) {
	t.Helper()
	var c net.Conn
	must(t, h.wire.Do(func() (err error) { c, err = net.Dial("udp", to+":9"); return err }))
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.Tick(5 * time.Millisecond); ; {
			select {
			case <-end:
				return
			case <-tick:
			}
			for range 20 {
				c.Write(make([]byte, 100)) // no socket listens there
			}
		}
	}()
	return func() { close(end); <-ended; c.Close() }
}

// testFifty creates and removes containers, one after the other.
func (h *host) testFifty(t *testing.T) {
	defer h.with(t)()
	before := devicesOf(t, h.NS) // others have programs of their own, for their accounts
	for k := range testkit.Scale(t, 5, 50) {
		name := "run" + strconv.Itoa(k)
		h.sleeper(t, name, "--label", isolate)
		i := h.agent.isolated(name, 1)
		h.remove(t, name)
		h.agent.forgets(i)
	}
	h.agent.idles(h.atStart)
	unchanged(t, h.NS, before, h.CgroupParent)
	// No path leads to a namespace of these containers.
	for inode, path := range netdev.Mounted("/proc", "self") {
		if strings.Contains(path, "fairlead") {
			t.Errorf("netns %d is kept by %s", inode, path)
		}
	}
}
