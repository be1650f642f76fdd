package main

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
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/enter"
	"github.com/fairlead-project/fairlead/metrics"
	"github.com/fairlead-project/fairlead/record"
)

// agentFlags are the flags of the agent, which are also the keys of the config file. Other verbs
// take the flags that they need by name.
type agentFlags struct {
	config   string
	level    string
	takeOver bool
	linger   time.Duration
	health   string
	cfg      agent.Config

	features *pflag.FlagSet // only the flags of the features
}

func newAgentFlags(e cli.Env) (*agentFlags, *pflag.FlagSet) {
	f := &agentFlags{cfg: agent.Config{Roots: kernel.Default(), Version: version}}
	f.cfg.RecordSize = record.DefaultSize
	s := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	s.StringVar(&f.config, "config", defaultConfig, "config file; every flag can be set in it as \"flag: value\"; empty: none")
	s.StringVar(&f.cfg.Socket, "socket", api.DefaultSocket, "unix socket of the agent")
	s.StringVar(&f.cfg.SelfSocket, "self-socket", filepath.Base(api.DefaultSelfSocket), "unix socket on which a container sees its own data; a name without / is one beside --socket; empty: none")
	s.StringVar(&f.cfg.StateDir, "state-dir", defaultState, "directory of the journal")
	s.StringVar(&f.cfg.PolicyDir, "policy-dir", defaultPolicies, "directory of the policy files *.yaml")
	s.BoolVar(&f.cfg.ImageLabels, "image-labels", false, "labels of images are policy, as labels of containers are: for hosts where only those who may set policy build images")
	s.StringVar(&f.cfg.DockerHost, "docker-host", e.Getenv("DOCKER_HOST"), "address of Docker, as in DOCKER_HOST; empty: its usual socket")
	s.StringVar(&f.cfg.PodmanHost, "podman-host", "", "address of Podman, as in DOCKER_HOST; empty: its usual socket")
	s.StringVar(&f.cfg.ContainerdAddr, "containerd", "", "unix socket of containerd; empty: its usual one, and those of k3s and RKE2, MicroK8s, and k0s")
	s.StringVar(&f.cfg.CRIOAddr, "crio", "", "unix socket of CRI-O; empty: its usual one")
	s.StringVar(&f.cfg.KubeletDir, "kubelet-dir", "", "directory of kubelet, usually /var/lib/kubelet: offer what can be guaranteed to pods as resources of the node, and guarantee what they request of it; empty: do not")
	s.StringVar(&f.cfg.Kubeconfig, "kubeconfig", "", "kubeconfig, or in-cluster for the service account of the agent's pod, to follow annotations that change while pods run; it needs the right to list and watch pods; empty: those of a pod's start count")
	s.StringVar(&f.cfg.NodeName, "node-name", e.Getenv("NODE_NAME"), "name of this node at the API server, as in NODE_NAME; empty: the host's name")
	s.StringVar(&f.cfg.SandboxDir, "sandbox-dir", "", "where the sandboxes of demo, bench and tests write what they are; empty: the usual directory")
	s.StringVar(&f.cfg.MetricsAddr, "metrics-addr", metrics.DefaultAddr, "address of the metrics page, or unix:/path for a socket of mode 0660; empty: none")
	s.StringVar(&f.cfg.RecordDir, "record-dir", defaultRecord, "directory of the recording; empty: nothing is recorded")
	s.Var((*sizeFlag)(&f.cfg.RecordSize), "record-size", "most that the recording takes on disk, such as 64mb")
	s.DurationVar(&f.cfg.RecordAge, "record-age", record.DefaultAge, "how long the recording goes back at most")
	s.StringVar(&f.cfg.Roots.Proc, "proc", f.cfg.Roots.Proc, "where the host's proc is mounted, with writable sys/net and irq; in a container its own is read-only there")
	s.StringVar(&f.cfg.Roots.BPFFS, "bpffs", f.cfg.Roots.BPFFS, "where the BPF file system is mounted")
	f.features = pflag.NewFlagSet("features", pflag.ContinueOnError)
	for _, x := range features() {
		if x.flags != nil {
			x.flags(f.features, &f.cfg.FeatureConfig)
		}
	}
	s.AddFlagSet(f.features)
	s.BoolVar(&f.takeOver, "take-over", false, "if another agent works on this host, wait until it stops, and go on with what it has applied")
	s.DurationVar(&f.linger, "linger", 0, "how long the agent works on after it was told to stop, before it undoes all changes: longer than a supervisor that starts it again waits before it kills it, 5s with Kubernetes")
	s.StringVar(&f.health, "health-dir", "", "directory in which the agent shows fairlead health that it is ready and alive; empty: it does not")
	s.StringVar(&f.level, "log-level", "info", "lowest level to log: debug, info, warn or error")
	return f, s
}

// take adds some of the agent's flags to cmd.
func (f *agentFlags) take(cmd *cobra.Command, from *pflag.FlagSet, names ...string) {
	for _, n := range names {
		cmd.Flags().AddFlag(from.Lookup(n))
	}
}

func agentVerb(e cli.Env) *cobra.Command {
	f, flags := newAgentFlags(e)
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
			if err := configure(cmd, f.config, flags); err != nil {
				return err
			}
			return runAgent(cmd.Context(), e, f)
		},
	}
	cmd.Flags().AddFlagSet(flags)
	return cmd
}

func runAgent(ctx context.Context, e cli.Env, f *agentFlags) error {
	if os.Geteuid() != 0 {
		return errors.New("the agent needs root, to change devices and control groups of the host")
	}
	log, err := newLog(e, f.level)
	if err != nil {
		return err
	}
	if err := enter.HostCgroups(f.cfg.Roots.Proc); err != nil {
		log.Warn("cgroups of containers may not be seen", "err", err)
	}
	f.cfg.Log = log
	f.cfg.SelfSocket = beside(f.cfg.Socket, f.cfg.SelfSocket)
	h, err := openHealth(f.health)
	if err != nil {
		return err
	}
	f.cfg.Ready = func() {
		notify(log, daemon.SdNotifyReady)
		h.ready(log, true)
		log.Info("agent is ready", "socket", f.cfg.Socket, "version", version)
	}
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("systemd watchdog", "err", err)
	}
	f.cfg.Alive = func() {
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
				if f.linger > 0 {
					log.Info("the agent was told to stop: it works on for now", "until", time.Now().Add(f.linger).Round(time.Second))
				}
				followed, err := a.Succeeded(work, f.linger)
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
func newAgent(ctx context.Context, f *agentFlags, h *health) (*agent.Agent, error) {
	if !f.takeOver {
		return agent.New(f.cfg)
	}
	next, err := agent.Succeed(f.cfg)
	if err != nil {
		return nil, err
	}
	defer next.Close()
	waited := h.waiting(f.cfg.Log)
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
func newLog(e cli.Env, level string) (*slog.Logger, error) {
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
