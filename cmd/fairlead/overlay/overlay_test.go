package overlay

import (
	"context"
	"testing"

	"github.com/fairlead-project/fairlead/agent/serve"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/policy"
)

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }

func TestScripts(t *testing.T) { verbtest.Scripts(t, run) }

// The line of policy that the verb shows is one.
func TestOverlayPolicy(t *testing.T) {
	if _, problems := policy.ParseFile("50-overlay.yaml", []byte(overlayPolicy+"\n")); len(problems) > 0 {
		t.Error(problems)
	}
}

// switching is an agent with one network, which it kills and revives.
type switching struct{ serve.Backend }

func (switching) Report(context.Context, api.Ask) (any, error) {
	return api.Overlay{Networks: []api.OverlayNetwork{{Network: "flannel.1", State: api.OverlayOn}}}, nil
}

func (switching) Command(_ context.Context, ask api.Ask) (any, error) {
	to := ask.Body.(api.OverlaySwitch)
	n := api.OverlayNetwork{Network: to.Network, State: api.OverlayOn}
	if to.Kill {
		n.State, n.Why = api.OverlayKilled, "by "+to.By+" at 2026-11-22T08:30:00Z"
	}
	return n, nil
}

func TestOverlayKill(t *testing.T) {
	verbtest.Prints(t, run, switching{}, "flannel.1 is killed: by uid 0 at 2026-11-22T08:30:00Z\n  to end that: fairlead overlay revive flannel.1\n", "overlay", "kill", "flannel.1")
	verbtest.Prints(t, run, switching{}, "flannel.1 is on\n", "overlay", "revive", "flannel.1")
	verbtest.Ended(t, cli.Failed, `there is no overlay network "eth0" here`)(verbtest.Against(t, run, switching{}, "overlay", "kill", "eth0"))
}
