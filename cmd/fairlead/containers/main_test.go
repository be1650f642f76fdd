package containers

import (
	"context"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
)

func run(ctx context.Context, e cli.Env) int { return verbtest.Run(ctx, Verbs(), e) }
