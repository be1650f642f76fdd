// Package node contains the verbs that work on the node itself: agent, which runs the agent, health
// for its supervisor, and doctor. They do their work without asking an agent; main lists them.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel/bpf"
	"github.com/fairlead-project/fairlead/kernel/enter"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Verbs returns the verbs of this package.
func Verbs() []verb.Verb {
	return []verb.Verb{agentVerb, healthVerb, doctorVerb}
}

func agentVerb(e verb.Env) *cobra.Command {
	f, flags := verb.NewAgentFlags(e)
	cmd := &cobra.Command{
		Use:        "agent",
		SuggestFor: []string{"start", "run", "daemon", "serve"},
		Short:      "Enforce policy on this host, until stopped",
		Long: `Enforce policy on this host, until stopped by SIGINT or SIGTERM; then undo all
changes. On SIGHUP, read the policy files again.

With --take-over a second agent may be started while one works. It waits. When
the first is told to stop, that one then leaves what is in force to it, and
undoes nothing.

With --linger an agent that is told to stop works on for that time. One that is
killed meanwhile, to be started again, leaves what is in force to the next.`,
		Args: cli.NArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := verb.Configure(cmd, f.Config, flags); err != nil {
				return err
			}
			return runAgent(cmd.Context(), e, f)
		},
	}
	cmd.Flags().AddFlagSet(flags)
	return cmd
}

func runAgent(ctx context.Context, e verb.Env, f *verb.AgentFlags) error {
	if os.Geteuid() != 0 {
		return errors.New("the agent needs root, to change devices and control groups of the host")
	}
	log, err := newLog(e, f.Level)
	if err != nil {
		return err
	}
	if err := enter.HostCgroups(f.Cfg.Roots.Proc); err != nil {
		log.Warn("cgroups of containers may not be seen", "err", err)
	}
	if err := sched.BeNice(agent.Nice); err != nil {
		log.Warn("a flood of packets may delay the agent", "err", err)
	}
	f.Cfg.Log = log
	f.Cfg.SelfSocket = beside(f.Cfg.Socket, f.Cfg.SelfSocket)
	h, err := openHealth(f.Health)
	if err != nil {
		return err
	}
	f.Cfg.Ready = func() {
		notify(log, daemon.SdNotifyReady)
		h.ready(log, true)
		log.Info("agent is ready", "socket", f.Cfg.Socket, "version", f.Cfg.Version)
	}
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("systemd watchdog", "err", err)
	}
	f.Cfg.Alive = func() {
		if every > 0 {
			notify(log, daemon.SdNotifyWatchdog)
		}
		h.alive(log)
	}
	a, err := newAgent(ctx, f, h)
	if err != nil || a == nil {
		return err
	}

	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	go func() {
		for {
			select {
			case <-hangup:
				a.Reload(ctx) // Reload logs the result
			case <-ctx.Done():
				notify(log, daemon.SdNotifyStopping)
				if f.Linger > 0 {
					log.Info("the agent was told to stop: it works on for now", "until", time.Now().Add(f.Linger).Round(time.Second))
				}
				followed, err := a.Succeeded(work, f.Linger)
				if followed {
					if err != nil {
						log.Warn("not all that is in force lasts until the next agent works", "err", err)
					}
					log.Info("another agent takes over: what is in force stays")
					os.Exit(cli.Done)
				}
				if err != nil {
					log.Warn("what is in force is undone", "err", err)
				}
				stop()
				return
			case <-work.Done():
				return
			}
		}
	}()
	return a.Run(work)
}

// newAgent makes the agent, with takeOver once no other agent works. It returns nil if ctx ends
// first.
func newAgent(ctx context.Context, f *verb.AgentFlags, h *health) (*agent.Agent, error) {
	if !f.TakeOver {
		return agent.New(f.Cfg)
	}
	next, err := agent.Succeed(f.Cfg)
	if err != nil {
		return nil, err
	}
	defer next.Close()
	waited := h.waiting(f.Cfg.Log)
	err = next.Wait(ctx)
	waited()
	if errors.Is(err, context.Canceled) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return next.New()
}

// beside returns the path of a socket. A bare name is in the directory of the agent's socket, so
// that two agents with different directories have different sockets.
func beside(socket, name string) string {
	if name == "" || strings.Contains(name, "/") {
		return name
	}
	return filepath.Join(filepath.Dir(socket), name)
}

func notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("notify systemd", "err", err)
	}
}

// newLog makes a log to stderr, without the time if systemd adds its own.
func newLog(e verb.Env, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, cli.Usagef("--log-level %q: want debug, info, warn or error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	if e.Getenv("JOURNAL_STREAM") != "" {
		opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}
	}
	return slog.New(slog.NewTextHandler(e.Stderr, opts)), nil
}

// The files in the directory of --health-dir. An agent that waits to take over also shows its state
// there. The API cannot show it: until then another agent answers on the socket.
const (
	readyFile = "ready" // is there while the agent is ready
	aliveFile = "alive" // the last sign of life, in ns of CLOCK_MONOTONIC
)

// mostSilent is the longest time between signs of life of a working agent; one is due each second.
const mostSilent = 10 * time.Second

// health shows the state of an agent to supervisors that do not know sd_notify. Nil shows nothing.
type health struct{ dir string }

func openHealth(dir string) (*health, error) {
	if dir == "" {
		return nil, nil
	}
	h := &health{dir}
	// An earlier agent may have left this file.
	if err := os.Remove(filepath.Join(dir, readyFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("show health: %w", err)
	}
	return h, h.beat()
}

func (h *health) ready(log *slog.Logger, is bool) {
	if h == nil {
		return
	}
	name := filepath.Join(h.dir, readyFile)
	err := os.Remove(name)
	if is {
		err = os.WriteFile(name, nil, 0o644)
	}
	if err != nil {
		log.Warn("show health", "err", err)
	}
}

func (h *health) alive(log *slog.Logger) {
	if h == nil {
		return
	}
	if err := h.beat(); err != nil {
		log.Warn("show health", "err", err)
	}
}

// beat renames a file, so that a reader finds either sign of life complete.
func (h *health) beat() error {
	name := filepath.Join(h.dir, aliveFile)
	err := os.WriteFile(name+".new", strconv.AppendUint(nil, bpf.Clock(), 10), 0o644)
	if err == nil {
		err = os.Rename(name+".new", name)
	}
	if err != nil {
		return fmt.Errorf("show health: %w", err)
	}
	return nil
}

// waiting shows that an agent is ready to take over, until the returned function is called.
func (h *health) waiting(log *slog.Logger) (waited func()) {
	if h == nil {
		return func() {}
	}
	h.ready(log, true)
	waits, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for verb.Wait(waits, time.Second) == nil {
			h.alive(log)
		}
	}()
	return func() {
		stop()
		<-ended // the agent's own signs of life are in the same files
		h.ready(log, false)
	}
}

func healthVerb(e verb.Env) *cobra.Command {
	f, flags := verb.NewAgentFlags(e)
	cmd := &cobra.Command{
		Use:   "health ready|alive|wait",
		Short: "Tell a supervisor whether the agent is ready, or alive",
		Long: `Tell a supervisor, such as Kubernetes by its probes, about the agent with the
same --health-dir. An agent is ready once it has seen every container and has
begun to apply policy, and while it waits to take over. It is alive unless one of
its loops hangs. With wait it asks nobody, and ends when it is told to: a pod in
which verbs are run has nothing else to do.`,
		Args:      cli.NArgs(1, 1, "ready, alive or wait"),
		ValidArgs: []string{readyFile, aliveFile, "wait"},
	}
	f.Take(cmd, flags, "health-dir", "config")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if args[0] == "wait" {
			<-cmd.Context().Done()
			return nil
		}
		if err := verb.Configure(cmd, f.Config, flags); err != nil {
			return err
		}
		if f.Health == "" {
			return cli.Usagef("--health-dir is needed: that of the agent")
		}
		switch args[0] {
		case readyFile:
			if _, err := os.Stat(filepath.Join(f.Health, readyFile)); err != nil {
				return fmt.Errorf("the agent is not ready: %w", err)
			}
			return nil
		case aliveFile:
			return lives(f.Health)
		}
		return cli.Usagef("%q: want ready, alive or wait", args[0])
	}
	return cmd
}

// lives returns an error unless the agent has recently given a sign of life.
func lives(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, aliveFile))
	if err != nil {
		return fmt.Errorf("the agent gives no sign of life: %w", err)
	}
	last, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return fmt.Errorf("read the agent's sign of life: %w", err)
	}
	if silent := time.Duration(bpf.Clock()) - time.Duration(last); silent > mostSilent {
		return fmt.Errorf("the agent has given no sign of life for %v", silent.Round(time.Second))
	}
	return nil
}
