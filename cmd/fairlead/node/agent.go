// Package node has the verbs that work on the node itself: agent, which runs the agent, health for its
// supervisor, and doctor. They ask no agent for what they do; main lists them.
package node

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel/enter"
)

// Verbs are the verbs of this package.
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

// newAgent makes the agent, with takeOver once no other one works. It returns nil if ctx has ended
// before that.
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

// beside returns the path of a socket: a bare name is one in the directory of the agent's, so that two
// agents, which have two of these, do not meet at the other.
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
