// Command cluster is the test's cluster of Kubernetes in the hands of a person, as root:
//
//	go run ./test/kubernetes/cluster up
//	go run ./test/kubernetes/cluster kubectl get pods -A
//	go run ./test/kubernetes/cluster in n1 COMMAND...
//	go run ./test/kubernetes/cluster import IMAGE.tar
//	go run ./test/kubernetes/cluster down
//
// It is no product and no test; package kubernetes does all that it does.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/fairlead-project/fairlead/test/kubernetes"
)

// dir is the directory of the cluster. Tests use others.
const dir = "/tmp/flkubernetes"

func main() {
	err := do(context.Background(), os.Args[1:])
	if exit, ok := err.(*exec.ExitError); ok { // of a program that is attached, which has said why
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func do(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("want up, kubectl ARGUMENTS, in NODE COMMAND, import IMAGE or down")
	}
	if args[0] == "up" {
		c, err := kubernetes.Start(ctx, dir, 2)
		if err == nil {
			fmt.Printf("%d nodes are ready; logs are in %s\n", len(c.Nodes), dir)
		}
		return err
	}
	c, err := kubernetes.Open(dir)
	if err != nil {
		return err
	}
	switch rest := args[1:]; {
	case args[0] == "kubectl":
		return attached(c.Command(ctx, args...))
	case args[0] == "in" && len(rest) > 1:
		i := slices.IndexFunc(c.Nodes, func(n *kubernetes.Node) bool { return n.Name == rest[0] })
		if i < 0 {
			return fmt.Errorf("no node %q", rest[0])
		}
		return attached(c.Nodes[i].Command(ctx, rest[1:]...))
	case args[0] == "import" && len(rest) == 1:
		image, err := filepath.Abs(rest[0]) // nodes are in folders of their own
		for _, n := range c.Nodes {
			err = cmp.Or(err, n.Import(ctx, image))
		}
		return err
	case args[0] == "down" && len(rest) == 0:
		return c.Stop()
	}
	return fmt.Errorf("cannot do %q", args)
}

// attached runs cmd with this program's own input and output.
func attached(cmd *exec.Cmd) error {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}
