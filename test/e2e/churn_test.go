package e2e

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"golang.org/x/sys/unix"
)

// churner starts containers that end by themselves, on an engine with an attachable overlay
// network. There a container also has a second network, docker_gwbridge.
type churner struct {
	*host
	n     int
	plain bool // without labels
}

const churnNetwork, secondNetwork = "flchurn", "flsecond"

func newChurner(t *testing.T) *churner {
	h := newHost(t)
	h.Must(t, "swarm", "init", "--advertise-addr", "10.213.0.1", "--listen-addr", "10.213.0.1:2377")
	h.AwaitGateway(t)
	h.Must(t, "network", "create", "-d", "overlay", "--attachable", "--subnet", "10.217.0.0/16", churnNetwork)
	return &churner{host: h}
}

// run starts the container with a number. It lives for one to four seconds.
func (c *churner) run(n int) error {
	args := []string{"run", "-d", "--rm", "--cpus", fmt.Sprintf("0.%d", 1+n%9)}
	if n%3 == 0 {
		args = append(args, "--network", churnNetwork)
	}
	netcpu := []string{"isolate", "charge", "auto", "observe"}[n%4]
	labels := []string{"netcpu=" + netcpu, fmt.Sprintf("net.ceil=%dmbit", 10+n%90), fmt.Sprintf("net.ingress.ceil=%dmbit", 10+n%90), "latency=on", "io.yield=auto"}
	for _, l := range labels {
		if !c.plain {
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
	must(t, errors.Join(errs...))
}

// rounds logs the CPU time that the agent spends for each container of some rounds.
func (c *churner) rounds(t *testing.T, what string, rounds int) {
	t.Helper()
	began, cpu, first := time.Now(), testkit.CPUTime(t, c.agent.pid), c.n
	for range rounds {
		c.round(t)
	}
	c.empty(t)
	each := (testkit.CPUTime(t, c.agent.pid) - cpu) / time.Duration(c.n-first)
	t.Logf("%d containers %s in %v: %v of CPU each, %.1f MB", c.n-first, what, time.Since(began).Round(time.Second),
		each.Round(100*time.Microsecond), testkit.Resident(t, c.agent.pid)/1e6)
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

// TestChurn lets containers with every kind of label come and go quickly on two kinds of network. The
// agent must survive, log no warning, and leave nothing behind, neither on the host nor in itself.
func TestChurn(t *testing.T) {
	testkit.Later(t)
	c := newChurner(t)
	c.start()
	for range 2 { // each kind of container, and what is made once
		c.round(t)
	}
	c.empty(t)
	c.agent.idles(c.atStart)
	before := devicesOf(t, c.NS)
	held := c.agent.descriptors(t)
	c.rounds(t, "with labels", testkit.Scale(t, 18, 60))
	c.plain = true
	c.rounds(t, "without labels", testkit.Scale(t, 7, 20))
	c.agent.idles(c.atStart)
	await(t, "the host to be as before", func() error { // the engine's devices go a moment later
		return devicesOf(t, c.NS).diff(before)
	})
	await(t, "the agent to have no more descriptors than before", func() error {
		if now := c.agent.descriptors(t); now > held {
			return fmt.Errorf("it has %d, had %d", now, held)
		}
		return nil
	})
	c.logs(t, "no such line", "level=WARN", "level=ERROR")
	c.agent.stop()
}

// logs fails the test for each line of the agent's log that has one of the words, and not except.
func (c *churner) logs(t *testing.T, except string, words ...string) {
	t.Helper()
	log, err := os.ReadFile(c.agent.path("log"))
	must(t, err)
	for line := range strings.Lines(string(log)) {
		if !strings.Contains(line, except) && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(line, w) }) {
			t.Errorf("the agent logs: %s", line)
		}
	}
}

// meddle changes a container at random that runs or has just ended.
func (c *churner) meddle(r *rand.Rand) {
	out, err := c.Run("ps", "-q")
	ids := strings.Fields(out)
	if err != nil || len(ids) == 0 {
		return
	}
	id := ids[r.IntN(len(ids))]
	for _, args := range [][][]string{
		{{"network", "connect", secondNetwork, id}, {"network", "disconnect", "-f", secondNetwork, id}},
		{{"network", "disconnect", "-f", "bridge", id}},
		{{"rename", id, fmt.Sprintf("renamed-%d", r.IntN(1000))}},
		{{"update", "--cpus", fmt.Sprintf("0.%d", 1+r.IntN(9)), id}},
		{{"pause", id}, {"unpause", id}},
		{{"kill", id}},
	}[r.IntN(6)] {
		c.Run(args...) // fails where the container has ended
	}
}

// damage truncates the agent's journal, its copy, or both to half, or fills them with zeros.
func (c *churner) damage(r *rand.Rand) {
	which := r.IntN(3) // 2: both
	for i, file := range c.agent.journals() {
		if which == 1-i {
			continue
		}
		data, err := os.ReadFile(file)
		must(c.agent.t, err)
		damaged := [][]byte{data[:len(data)/2], make([]byte, len(data))}[r.IntN(2)]
		must(c.agent.t, os.WriteFile(file, damaged, 0o600))
	}
}

// TestChurnCampaign kills the agent at random points, and now and then the engine, while containers
// come and go and other programs change them. Every third kill damages the agent's files. Each next
// agent adopts what it finds, and in the end nothing is left.
func TestChurnCampaign(t *testing.T) {
	testkit.Later(t)
	kills, engineKills := testkit.Scale(t, 10, 1000), testkit.Scale(t, 1, 5)
	c := newChurner(t)
	c.Must(t, "network", "create", secondNetwork)
	c.start()
	before := devicesOf(t, c.NS)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var started atomic.Int64
	ended := make(chan struct{})
	var others sync.WaitGroup
	for i := range uint64(4) {
		others.Go(func() {
			r := rand.New(rand.NewPCG(seed, 1+i))
			for {
				select {
				case <-ended:
					return
				default:
				}
				if i == 0 {
					c.meddle(r)
				} else if c.run(r.IntN(1000)) == nil { // it fails while the engine is away
					started.Add(1)
				}
			}
		})
	}
	for n := range kills {
		time.Sleep(time.Duration(r.Int64N(int64(time.Second))))
		c.agent.kill()
		if n%3 == 0 {
			c.damage(r)
		}
		if n%(kills/engineKills) == kills/engineKills-1 {
			c.Kill()
			c.Start(t)
		}
		c.agent.launch()
	}
	close(ended)
	others.Wait()
	t.Logf("%d containers, %d kills of the agent, %d of the engine", started.Load(), kills, engineKills)
	await(t, "paused containers to go on, and all to end", func() error {
		out, err := c.Run("ps", "-aq")
		if err == nil && out != "" {
			c.Run(append([]string{"rm", "-f"}, strings.Fields(out)...)...)
			err = fmt.Errorf("%d are left", len(strings.Fields(out)))
		}
		for _, file := range c.cgroups() { // a killed engine leaves what it was about to start
			pids, _ := os.ReadFile(file)
			for pid := range strings.FieldsSeq(string(pids)) {
				n, _ := strconv.Atoi(pid)
				err = errors.Join(err, fmt.Errorf("process %d is left", n), unix.Kill(n, unix.SIGKILL))
			}
		}
		return err
	})
	c.agent.kill()
	c.agent.start()
	c.agent.idles(c.atStart)
	c.AwaitGateway(t) // as at first
	after := devicesOf(t, c.NS)
	for key, value := range after {
		// A killed engine leaves veths, which must have nothing of ours.
		if strings.Contains(key, " veth") && (value == "0 programs" || !strings.HasSuffix(key, "gress")) {
			delete(after, key)
		}
	}
	maps.DeleteFunc(before, func(key, _ string) bool { return strings.Contains(key, " veth") })
	testkit.Is(t, "the host has changed", after.diff(before), nil)
	c.logs(t, "journal was damaged", "panic", "level=ERROR")
	c.agent.stop()
}

// descriptors counts the open files of the agent.
func (a *agent) descriptors(t *testing.T) int {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", a.pid))
	must(t, err)
	return len(fds)
}
