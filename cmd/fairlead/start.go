//go:build !manual

package main

import (
	"context"
	"os"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

func main() {
	os.Exit(run(context.Background(), cli.Env{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Args: os.Args[1:]}))
}
