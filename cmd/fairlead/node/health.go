package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// The files in the directory of --health-dir. An agent that waits to take over shows its state there
// too, so the API cannot do this: while it waits, another agent answers at the socket.
const (
	readyFile = "ready" // is there while the agent is ready
	aliveFile = "alive" // the last sign of life, in ns of CLOCK_MONOTONIC
)

// mostSilent is how long an agent that works gives no sign of life at most; it is due each second.
const mostSilent = 10 * time.Second

// health shows the state of an agent to supervisors that do not know sd_notify. Nil shows nothing.
type health struct{ dir string }

func openHealth(dir string) (*health, error) {
	if dir == "" {
		return nil, nil
	}
	h := &health{dir}
	// An earlier agent may have left it.
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

// beat renames, so that a reader finds one sign of life or the next.
func (h *health) beat() error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	name := filepath.Join(h.dir, aliveFile)
	err = os.WriteFile(name+".new", strconv.AppendInt(nil, int64(now), 10), 0o644)
	if err == nil {
		err = os.Rename(name+".new", name)
	}
	if err != nil {
		return fmt.Errorf("show health: %w", err)
	}
	return nil
}

// waiting shows that an agent is ready to take over, until the function that it returns is called.
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

func monotonic() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return time.Duration(now.Nano()), nil
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

// lives returns an error unless the agent has given a sign of life lately.
func lives(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, aliveFile))
	if err != nil {
		return fmt.Errorf("the agent gives no sign of life: %w", err)
	}
	last, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return fmt.Errorf("read the agent's sign of life: %w", err)
	}
	now, err := monotonic()
	if err != nil {
		return err
	}
	if silent := now - time.Duration(last); silent > mostSilent {
		return fmt.Errorf("the agent has given no sign of life for %v", silent.Round(time.Second))
	}
	return nil
}
