package bench

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/bench/load"
	"github.com/fairlead-project/fairlead/bench/rig"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/sandbox"
)

// agentVerb makes this program the agent of a rig: the real one, but with the
// rig's sandboxes for its only containers.
const agentVerb = "rig-agent"

// Reexec runs this program's part inside a rig if that is what it was started
// for: args are os.Args. It then returns true and the exit status; else false.
// Call it first thing in main and TestMain; it covers the packages sandbox, load and rig.
func Reexec(args []string) (status int, ok bool) {
	if len(args) > 1 && args[1] == agentVerb {
		if err := runAgent(args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1, true
		}
		return 0, true
	}
	for _, reexec := range []func([]string) (int, bool){sandbox.Reexec, load.Reexec, rig.Reexec} {
		if status, ok := reexec(args); ok {
			return status, true
		}
	}
	return 0, false
}

func runAgent(args []string) error {
	cfg := agent.Config{Roots: kernel.Default(), Version: "rig"}
	fs := flag.NewFlagSet(agentVerb, flag.ContinueOnError)
	fs.StringVar(&cfg.Socket, "socket", "", "unix socket of the agent")
	fs.StringVar(&cfg.StateDir, "state-dir", "", "directory of the journal")
	fs.StringVar(&cfg.PolicyDir, "policy-dir", "", "directory of the policy files")
	fs.StringVar(&cfg.DockerHost, "docker-host", "", "where Docker answers; with it, sandboxes are not looked for")
	xdp := fs.Bool("xdp", false, "drop in the driver of the rig's NIC")
	uplink := fs.Uint64("uplink", 0, "rate of the rig's NIC in bit/s; 0: nothing is shaped")
	sandboxes := fs.String("sandbox-dir", "", "directory of the sandboxes' state")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *uplink > 0 {
		cfg.Uplinks = map[string]uint64{rig.NICDevice: *uplink}
	}
	if *xdp {
		cfg.XDP = []string{rig.NICDevice}
	}
	if cfg.DockerHost != "" {
		cfg.Sources = []container.Source{container.Docker(cfg.DockerHost)}
	} else {
		cfg.Sources = []container.Source{sandbox.Source(cfg.Roots.Proc, *sandboxes)}
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	a, err := agent.New(cfg)
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// guard is the protection of a rig's containers: an agent in the rig's own
// network namespace, and a policy that is there or not.
type guard struct {
	rig     *rig.Rig
	uplink  uint64 // rate of the NIC that is divided, in bit/s; 0: none is
	xdp     bool   // whether it is to drop in the driver of the NIC
	feature string // which is to protect them
	mode    string // of netcpu, while it is on
	prefix  string // of the names of the containers
	count   int    // of the containers
	dir     string
	client  *api.Client
	process *sandbox.Process
	log     *tail
	on      bool
	others  rig.ProgramSet // the BPF programs that there were before the agent
	// missing is why the protection does nothing on this build or host; "" if
	// it works.
	missing string
	// unmetered is why it keeps no accounts; "" while it does.
	unmetered string
}

const policyFile = "rig.yaml"

// newGuard starts an agent for the rig and waits until it answers. Nothing is
// protected yet. mode is that of netcpu, while it is on; uplink, if not 0, is
// the rate of the NIC that is divided then, by feature traffic.
func newGuard(ctx context.Context, r *rig.Rig, mode string, uplink uint64) (*guard, error) {
	dir, err := r.TempDir("agent")
	if err != nil {
		return nil, err
	}
	g := &guard{rig: r, uplink: uplink, feature: "netcpu", mode: mode, prefix: r.Prefix(), count: len(r.Boxes), dir: dir, log: &tail{}}
	if uplink > 0 {
		g.feature = "traffic"
	}
	if err := os.Mkdir(filepath.Join(dir, "policy.d"), 0o755); err != nil {
		return nil, err
	}
	if err := g.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the rig's agent: %w", err), g.stop())
	}
	return g, nil
}

// start starts the agent, and waits until it answers.
func (g *guard) start(ctx context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	if g.others, err = rig.Programs(nil); err != nil {
		return err
	}
	socket := filepath.Join(g.dir, "agent.sock")
	cmd := exec.Command(exe, agentVerb, "--socket", socket, "--state-dir", filepath.Join(g.dir, "state"),
		"--policy-dir", filepath.Join(g.dir, "policy.d"), "--sandbox-dir", g.rig.Sandboxes.Dir(), "--docker-host", g.rig.DockerHost,
		"--uplink", fmt.Sprint(g.uplink), fmt.Sprintf("--xdp=%v", g.xdp))
	cmd.Args[0] = "fairlead"
	cmd.Stderr = g.log
	// It puts everything back even when this program is killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if g.process, err = g.rig.Node.Start(cmd); err != nil {
		return err
	}
	g.client = api.Dial(socket)
	return g.wait(ctx, func(api.Container, api.FeatureStatus) bool { return true })
}

// inDriver has the agent drop in the driver of the NIC, or not: it starts another
// one, which is told so.
func (g *guard) inDriver(ctx context.Context, xdp bool) error {
	if g.xdp == xdp {
		return nil
	}
	if err := errors.Join(g.set(ctx, false), g.stop()); err != nil {
		return err
	}
	g.xdp = xdp
	return g.start(ctx)
}

// checkDriver is an error if the agent cannot drop there.
func (g *guard) checkDriver(ctx context.Context) error {
	n, err := g.client.NetCPU(ctx, "")
	if err != nil {
		return g.explain(err)
	}
	for _, u := range n.Uplinks {
		if u.Device == rig.NICDevice && u.DropsBy == "xdp" {
			return nil
		}
	}
	return fmt.Errorf("the NIC does not drop by XDP: %+v", n.Uplinks)
}

// set brings the protection into force, or takes it away, and returns once the
// agent says that it is so.
func (g *guard) set(ctx context.Context, on bool) error {
	if g.on == on {
		return nil
	}
	text := ""
	if on {
		text = fmt.Sprintf("match: {name: %q}\nset: {netcpu: %q}\n", g.prefix+"*", g.mode)
	}
	return g.policy(ctx, text, func(c api.Container) (taken, changed bool) {
		asked := false
		for _, p := range c.Policy {
			asked = asked || p.Key == "fairlead.netcpu" && p.Value == g.mode
		}
		return asked == on, true
	})
}

// policy makes a text the policy, "" for none, and returns once the agent says
// that it has done what it says for all containers; stands says of one whether it
// has taken the text, and whether that says something else than the one before.
func (g *guard) policy(ctx context.Context, text string, stands func(api.Container) (taken, changed bool)) error {
	file := filepath.Join(g.dir, "policy.d", policyFile)
	before := time.Now()
	var err error
	if text != "" {
		err = os.WriteFile(file, []byte(text), 0o644)
	} else {
		err = os.Remove(file)
	}
	if err != nil {
		return err
	}
	if _, err := g.client.Reload(ctx); err != nil {
		return g.explain(err)
	}
	err = g.wait(ctx, func(c api.Container, s api.FeatureStatus) bool {
		taken, changed := stands(c)
		if !taken {
			return false
		}
		switch s.State {
		case api.StateNotBuilt, api.StateUnavailable:
			g.missing = s.State
			if s.Error != "" {
				g.missing += ": " + s.Error
			}
			return true
		}
		return (s.State == api.StateDone || s.State == api.StatePartly) && (!changed || s.Since.After(before))
	})
	if err != nil {
		return fmt.Errorf("switch the protection: %w", err)
	}
	g.on = text != ""
	return nil
}

// wait asks the agent for the containers until all stand as they should.
func (g *guard) wait(ctx context.Context, good func(api.Container, api.FeatureStatus) bool) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	last := "it does not answer"
	for {
		all, err := g.client.Containers(ctx)
		if err != nil && !errors.Is(err, api.ErrNoAgent) && ctx.Err() == nil {
			return g.explain(err)
		}
		stand := 0
		for _, c := range all {
			if !strings.HasPrefix(c.Name, g.prefix) {
				continue
			}
			var s api.FeatureStatus
			for _, f := range c.Features {
				if f.Feature == g.feature {
					s = f
				}
			}
			if good(c, s) {
				stand++
			} else {
				last = fmt.Sprintf("%s of %s is %s: %s", g.feature, strings.TrimPrefix(c.Name, g.prefix), s.State, s.Error)
			}
		}
		if stand == g.count {
			return nil
		}
		select {
		case <-ctx.Done():
			return g.explain(fmt.Errorf("%w (%s)", ctx.Err(), last))
		case <-g.process.Done():
			return g.explain(errors.New("the agent has ended"))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// explain adds what the agent said last.
func (g *guard) explain(err error) error {
	if errors.Is(err, context.Canceled) {
		return err // nothing is wrong with the agent
	}
	if said := g.log.String(); said != "" {
		return fmt.Errorf("%w; the agent's log ends:\n%s", err, said)
	}
	return err
}

// stop ends the agent, if there is one, which puts everything back.
func (g *guard) stop() error {
	var err error
	if g.process != nil {
		g.process.Signal(syscall.SIGTERM)
		select {
		case <-g.process.Done():
			if werr := g.process.Wait(); werr != nil {
				err = g.explain(fmt.Errorf("the rig's agent: %w", werr))
			}
		case <-time.After(15 * time.Second):
			g.process.Kill()
			err = g.explain(errors.New("the rig's agent did not end when told to"))
		}
	}
	if g.client != nil {
		g.client.Close()
	}
	g.process, g.client = nil, nil
	return err
}

// tail keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

var _ io.Writer = (*tail)(nil)

func (t *tail) Write(p []byte) (int, error) {
	const keep = 4096
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - keep; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(t.buf.String())
}
