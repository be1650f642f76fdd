//go:build !manual

package main

import (
	"context"
	"os"

	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

func main() {
	os.Exit(runAs(context.Background(), os.Args[0], cli.Env{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Args: os.Args[1:]}))
}
