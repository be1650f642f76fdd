package containers

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
)

// policyKey is one key of policy, as keys prints it.
type policyKey struct {
	Key     string `json:"key"`
	Values  string `json:"values"`
	Example string `json:"example"`
	Default string `json:"default,omitempty"`
	Meaning string `json:"meaning"`
	Feature string `json:"feature"`
	Host    bool   `json:"host,omitempty"`
}

func keysVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys [PREFIX]",
		Short: "List the keys of policy, with values, units and an example; needs no agent",
		Long: `List the keys of policy, or those that begin with PREFIX: what values each takes, an
example, what holds without it, and what it means. A key stands in a policy file as
it is listed, and in a label with "fairlead." in front. Labels do not count for keys
that act on others, or evade the host's rules, unless a policy file says "labels: host".`,
		Example: `  fairlead keys
  fairlead keys net.ingress`,
		Args: cli.NArgs(0, 1, "one PREFIX"),
	}
	out := cli.FormatFlag(cmd)
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		list := keysFrom(strings.TrimPrefix(strings.Join(args, ""), "fairlead."))
		if len(list) == 0 {
			return fmt.Errorf("no key begins with %q", args[0])
		}
		return out.Print(e.Stdout, list, func(w io.Writer) { printKeys(w, list) })
	}
	return cmd
}

func keysFrom(prefix string) (list []policyKey) {
	for _, k := range policy.Schema() {
		if strings.HasPrefix(k.Name, prefix) {
			list = append(list, policyKey{k.Name, k.Form, k.Example, k.Default, k.Meaning, k.Feature, k.Host != ""})
		}
	}
	return list
}

func printKeys(w io.Writer, list []policyKey) {
	for _, k := range list {
		fmt.Fprintf(w, "%s: %s\n", k.Key, k.Values)
		meaning := k.Meaning
		if k.Default != "" {
			meaning += "; without it: " + k.Default
		}
		for _, line := range cli.Fold(meaning, columns.Line-4) {
			fmt.Fprintf(w, "    %s\n", line)
		}
		example := fmt.Sprintf("fairlead.%s=%s", k.Key, k.Example)
		if strings.Contains(example, " ") {
			example = `"` + example + `"`
		}
		fmt.Fprintf(w, "    --label %s\n", example)
		if k.Host {
			fmt.Fprintln(w, `    (the label counts where a policy file says "labels: host")`)
		}
	}
	fmt.Fprintln(w, "\nUnits:")
	for _, u := range policy.Units() {
		for i, line := range cli.Fold(u.Forms, columns.Line-12) {
			name := u.Name
			if i > 0 {
				name = ""
			}
			fmt.Fprintf(w, "  %-8s  %s\n", name, line)
		}
	}
}
