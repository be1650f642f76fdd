package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// agentVerb makes this program the agent of a rig: the real agent, with the rig's
// sandboxes as its only containers.
const agentVerb = "rig-agent"

// Reexec runs this program as a part of a rig if args, which are os.Args, ask for that. It then
// returns the exit status and true. Otherwise it returns false. It includes Reexec of packages
// sandbox, load and rig. Call it first in main and TestMain.
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
	dir := fs.String("dir", "", "directory of the agent's socket, state and policy files")
	fs.StringVar(&cfg.DockerHost, "docker-host", "", "where Docker answers; with it, sandboxes are not looked for")
	xdp := fs.Bool("xdp", false, "drop in the driver of the rig's NIC")
	uplink := fs.Uint64("uplink", 0, "rate of the rig's NIC in bit/s; 0: nothing is shaped")
	sandboxes := fs.String("sandbox-dir", "", "directory of the sandboxes' state")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if err := sched.BeNice(agent.Nice); err != nil {
		return err
	}
	cfg.Socket, cfg.StateDir, cfg.PolicyDir = filepath.Join(*dir, agentSocket), filepath.Join(*dir, "state"), filepath.Join(*dir, policyDir)
	if *uplink > 0 {
		cfg.Uplinks = map[string]uint64{rig.NICDevice: *uplink}
	}
	if *xdp {
		cfg.XDP = map[string]struct{}{rig.NICDevice: {}}
	}
	if cfg.DockerHost != "" {
		cfg.Sources = []discover.Source{discover.Docker(cfg.DockerHost)}
	} else {
		cfg.Sources = []discover.Source{discover.Sandboxes(cfg.Roots.Proc, *sandboxes)}
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

// explain adds the end of the agent's log to an error.
func (g *guard) explain(err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err // the agent is not the cause
	}
	const most = 4096
	said, _ := os.ReadFile(filepath.Join(g.dir, agentLog))
	if said = bytes.TrimSpace(said[max(0, len(said)-most):]); len(said) == 0 {
		return err
	}
	return fmt.Errorf("%w; the agent's log ends:\n%s", err, said)
}

// stop ends the agent, if it runs. The agent undoes its changes.
func (g *guard) stop() error {
	var err error
	if g.process != nil {
		g.process.Signal(syscall.SIGTERM)
		select {
		case <-g.process.Done():
			if werr := g.process.Wait(); werr != nil {
				err = g.explain(fmt.Errorf("the rig's agent: %w", werr))
			}
		case <-time.After(30 * time.Second):
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

// guard protects a rig's containers. It runs an agent in the rig's network namespace, and switches
// the protection by a policy file.
type guard struct {
	dir     string // directory of its socket, state, policy and log
	client  *api.Client
	process *sandbox.Process // nil: not running
	rig     *rig.Rig
	uplink  uint64 // rate of the NIC in bit/s that feature traffic divides; 0: not divided
	xdp     bool   // drop packets in the driver of the NIC
	feature string // the feature under test
	prefix  string // prefix of the names of the protected containers
	count   int    // number of protected containers
	rules   rules  // in force
	// missing says why the protection has no effect on this host; "" if it works.
	missing string
	// unmetered says why the agent keeps no accounts; "" if it keeps them.
	unmetered string
}

// The files of a guard.
const (
	agentSocket = "agent.sock"
	agentLog    = "log"
	policyDir   = "policy.d"
	policyFile  = "rig.yaml"
)

// newGuard starts an agent for the rig, without rules, and waits until it answers. feature is the
// feature under test. protect is the prefix, in the rig, of the names of the protected containers. If
// uplink is not 0, feature traffic divides the NIC at that rate in bit/s.
func newGuard(ctx context.Context, r *rig.Rig, feature, protect string, uplink uint64) (*guard, error) {
	dir, err := r.TempDir("agent")
	if err != nil {
		return nil, err
	}
	g := &guard{dir: dir, rig: r, uplink: uplink, feature: feature, prefix: r.Prefix() + protect}
	for _, c := range r.Containers {
		if strings.HasPrefix(c.Name, protect) {
			g.count++
		}
	}
	if err := g.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the rig's agent: %w", err), g.stop())
	}
	return g, nil
}

// policies is the directory of the agent's policy files.
func (g *guard) policies() string { return filepath.Join(g.dir, policyDir) }

// start starts the agent, and waits until it answers.
func (g *guard) start(ctx context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(g.policies(), 0o755); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(g.dir, agentLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(exe, agentVerb, "--dir", g.dir, "--sandbox-dir", g.rig.Sandboxes.Dir(),
		"--docker-host", g.rig.DockerHost, "--uplink", fmt.Sprint(g.uplink), fmt.Sprintf("--xdp=%v", g.xdp))
	cmd.Args[0] = "fairlead"
	cmd.Stderr = log
	// The agent undoes its changes even if this program is killed. It leads a session, as it does below systemd.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setsid: true}
	if g.process, err = g.rig.Node.Start(cmd); err != nil {
		return err
	}
	g.client = api.Dial(filepath.Join(g.dir, agentSocket))
	return g.wait(ctx, func(api.Container, api.FeatureStatus) bool { return true })
}

// attended starts or stops the agent of a setup.
func (g *guard) attended(ctx context.Context, on bool) error {
	if on == (g.process != nil) {
		return nil
	}
	if !on {
		return g.stop()
	}
	return g.start(ctx)
}

// inDriver makes the agent drop packets in the driver of the NIC, or by tc. It restarts the agent
// for a change.
func (g *guard) inDriver(ctx context.Context, xdp bool) error {
	if g.xdp == xdp {
		return nil
	}
	if err := errors.Join(g.apply(ctx, nil), g.stop()); err != nil {
		return err
	}
	g.xdp = xdp
	return g.start(ctx)
}

// checkDriver returns an error unless the agent drops packets in the driver.
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

// rules maps a pattern of container names in the rig to settings in the form of a policy file:
// "net.weight: 1", or several in braces.
type rules map[string]string

// of returns the settings of a container.
func (r rules) of(name string) string {
	for pattern, set := range r {
		if match, _ := path.Match(pattern, name); match {
			return set
		}
	}
	return ""
}

// stand reports whether these are the only settings of a container that are not defaults.
func stand(set string, of []api.Setting) bool {
	n := 0
	for _, p := range of {
		if p.From == "default" {
			continue
		}
		value := p.Value
		if was, decided := strings.CutPrefix(p.Instead, p.Key+"="); decided { // by a controller, in the mode auto
			value, _, _ = strings.Cut(was, " ")
		}
		if n++; !strings.Contains(set, strings.TrimPrefix(p.Key, "fairlead.")+": "+value) {
			return false
		}
	}
	return n == strings.Count(set, ": ")
}

// text returns rules in the form of a policy file.
func (g *guard) text(r rules) (text string) {
	for _, pattern := range slices.Sorted(maps.Keys(r)) {
		text += fmt.Sprintf("---\nmatch: {name: %q}\nset: {%s}\n", g.rig.Prefix()+pattern, strings.Trim(r[pattern], "{}"))
	}
	return text
}

// apply replaces the policy file by one with the given rules, or removes the file if there are none.
// It waits until the agent has applied the rules to all protected containers.
func (g *guard) apply(ctx context.Context, r rules) error {
	if maps.Equal(r, g.rules) {
		return nil
	}
	file := filepath.Join(g.policies(), policyFile)
	before := time.Now()
	var err error
	if len(r) > 0 {
		err = os.WriteFile(file, []byte(g.text(r)), 0o644)
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
		name := strings.TrimPrefix(c.Name, g.rig.Prefix())
		if !stand(r.of(name), c.Policy) {
			return false
		}
		if s.State == api.StateUnavailable {
			g.missing = strings.TrimSuffix(s.State+": "+s.Error, ": ")
			return true
		}
		return (s.State == api.StateDone || s.State == api.StatePartly) && (r.of(name) == g.rules.of(name) || s.Since.After(before))
	})
	if err != nil {
		return fmt.Errorf("switch the protection: %w", err)
	}
	g.rules = r
	return nil
}

// wait polls the agent until good accepts the status of the feature for all protected containers.
func (g *guard) wait(ctx context.Context, good func(api.Container, api.FeatureStatus) bool) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	last, refused := "it does not answer", error(nil)
	err := load.Await(ctx, g.process.Done(), func() bool {
		all, err := g.client.Containers(ctx)
		if err != nil && !errors.Is(err, api.ErrNoAgent) && ctx.Err() == nil {
			refused = err
			return true
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
		return stand == g.count
	})
	if err != nil {
		err = fmt.Errorf("%w (%s)", err, last)
	}
	return g.explain(cmp.Or(err, refused))
}
