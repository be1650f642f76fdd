package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/policy"
)

func policyVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Check policy files, or make the agent load them",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return usagef("say what: check or reload")
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(policyCheckVerb(e), policyReloadVerb(e))
	return cmd
}

func policyCheckVerb(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE...",
		Short: "List the mistakes in policy files; needs no agent",
		Args:  nargs(1, 1<<20, "FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			bad := false
			for _, name := range args {
				ok, err := checkPolicy(e, name)
				if err != nil {
					return err
				}
				bad = bad || !ok
			}
			if bad {
				return errTold
			}
			return nil
		},
	}
}

func checkPolicy(e env, name string) (ok bool, err error) {
	f, err := os.Open(name)
	if err != nil {
		return false, fmt.Errorf("policy: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, policy.MaxFileSize+1))
	if err != nil {
		return false, fmt.Errorf("policy: %w", err)
	}
	if len(data) > policy.MaxFileSize {
		return false, fmt.Errorf("policy: %s is larger than %d bytes", name, policy.MaxFileSize)
	}
	p, problems := policy.ParseFile(name, data)
	for _, x := range problems {
		fmt.Fprintln(e.stderr, lines(x.String()))
	}
	if p == nil {
		return false, nil
	}
	fmt.Fprintf(e.stdout, "%s: good, %d policies\n", showText(name), p.Len())
	for _, x := range p.Unavailable() {
		fmt.Fprintf(e.stdout, "note: %s\n", lines(x.String()))
	}
	return true, nil
}

func policyReloadVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Make the agent read its policy files again, and enforce what restore has undone",
		Args:  nargs(0, 0, ""),
	}
	out := formatFlag(cmd)
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, _ []string) error {
		st, err := c.Reload(cmd.Context())
		if err != nil {
			return err
		}
		err = out.print(e.stdout, st, func(w io.Writer) {
			if st.OK {
				fmt.Fprintf(w, "loaded %d files from %s\n", len(st.Files), show(st.Dir))
			}
			for _, p := range st.Problems {
				fmt.Fprintln(w, lines(p.Text))
			}
		})
		if err == nil && !st.OK {
			err = fmt.Errorf("%s:\n%s", lastGood(st), st.Error)
		}
		return err
	})
}
