package latency

import (
	"context"
	"testing"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }

func TestScripts(t *testing.T) { verbtest.Scripts(t, run) }
