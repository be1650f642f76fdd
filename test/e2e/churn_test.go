package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// churner starts containers that end by themselves, on an engine with an attachable overlay
// network. On that one a container has a second network, docker_gwbridge, too.
type churner struct {
	*host
	bare bool // its containers have no labels
	n    int
}

const churnNetwork = "flchurn"

func newChurner(t *testing.T) *churner {
	h := newHost(t)
	h.Must(t, "swarm", "init", "--advertise-addr", "10.213.0.1", "--listen-addr", "10.213.0.1:2377")
	h.Must(t, "network", "create", "-d", "overlay", "--attachable", "--subnet", "10.217.0.0/16", churnNetwork)
	return &churner{host: h}
}

// run starts the container of a number, which lives for one to four seconds.
func (c *churner) run(n int) error {
	args := []string{"run", "-d", "--rm", "--cpus", fmt.Sprintf("0.%d", 1+n%9)}
	if n%3 == 0 {
		args = append(args, "--network", churnNetwork)
	}
	if !c.bare {
		netcpu := []string{"isolate", "charge", "auto", "observe"}[n%4]
		for _, l := range []string{"netcpu=" + netcpu, fmt.Sprintf("net.ceil=%dmbit", 10+n%90), fmt.Sprintf("net.ingress.ceil=%dmbit", 10+n%90), "latency=on", "io.yield=auto"} {
			args = append(args, "--label", "fairlead."+l)
		}
	}
	_, err := c.Run(append(args, c.Image, "sleep", fmt.Sprint(1+n%4))...)
	return err
}

// round starts eight containers side by side.
func (c *churner) round(t *testing.T) {
	t.Helper()
	errs := make([]error, 8)
	var all sync.WaitGroup
	for i := range errs {
		n := c.n + i
		all.Go(func() { errs[i] = c.run(n) })
	}
	all.Wait()
	c.n += len(errs)
	for _, err := range errs {
		must(t, err)
	}
}

// empty waits until no container runs.
func (c *churner) empty(t *testing.T) {
	t.Helper()
	await(t, "all containers to end", func() error {
		out, err := c.Run("ps", "-aq")
		if err == nil && out != "" {
			err = fmt.Errorf("%d run", len(strings.Fields(out)))
		}
		return err
	})
}

// TestChurn lets containers with every kind of label come and go quickly on two kinds of network.
// The agent lives, warns of nothing, and leaves nothing: neither on the host nor in itself.
func TestChurn(t *testing.T) {
	c := newChurner(t)
	c.start()
	c.round(t) // what is made once
	c.empty(t)
	c.agent.idles(c.atStart)
	before := state{}
	before.readDevices(t, "host", c.NS.Path)
	held, memory := c.agent.descriptors(t), testkit.Resident(t, c.agent.pid)
	began, cpu, first := time.Now(), testkit.CPUTime(t, c.agent.pid), c.n
	for range testkit.Scale(t, 8, 60) {
		c.round(t)
	}
	c.empty(t)
	each := (testkit.CPUTime(t, c.agent.pid) - cpu) / time.Duration(c.n-first)
	took := time.Since(began)
	c.agent.idles(c.atStart)
	t.Logf("%d containers in %v: %v of CPU each, %.1f MB, were %.1f", c.n-first, took.Round(time.Second),
		each.Round(100*time.Microsecond), testkit.Resident(t, c.agent.pid)/1e6, memory/1e6)
	after := state{}
	after.readDevices(t, "host", c.NS.Path)
	if diff := after.diff(before); diff != "" {
		t.Errorf("the host has changed:\n%s", diff)
	}
	await(t, "the agent to have no more descriptors than before", func() error {
		if now := c.agent.descriptors(t); now > held {
			return fmt.Errorf("it has %d, had %d", now, held)
		}
		return nil
	})
	log, err := os.ReadFile(c.agent.path("log"))
	must(t, err)
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			t.Errorf("the agent logs: %s", line)
		}
	}
	c.agent.stop()
}

// descriptors counts the open files of the agent.
func (a *agent) descriptors(t *testing.T) int {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", a.pid))
	must(t, err)
	return len(fds)
}
