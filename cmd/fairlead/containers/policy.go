package containers

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/policy"
)

func policyVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "policy",
		SuggestFor: []string{"reload", "validate", "lint"},
		Short:      "Check policy files, or make the agent load them",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.Unknown(cmd, "command", args[0])
			}
			return cli.Usagef("say what: check or reload")
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(policyCheckVerb(e), policyReloadVerb(e))
	return cmd
}

func policyCheckVerb(e verb.Env) *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE|DIRECTORY|KEY=VALUE...",
		Short: "List the mistakes in policy files, directories and single values; needs no agent",
		Long: `List the mistakes in policy: in files, in directories of them as the agent reads them,
and in single values as for a label or for fairlead set, which are checked together.
A good value is printed as it was understood. The command needs no agent.`,
		Example: `  fairlead policy check /etc/fairlead/policy.d
  fairlead policy check web.yaml
  fairlead policy check net.rate=10mbit net.ceil=20mbit`,
		Args: cli.NArgs(1, 1<<20, "FILE, DIRECTORY or KEY=VALUE"),
		RunE: func(_ *cobra.Command, args []string) error {
			good := true
			var values []policy.Override
			for _, arg := range args {
				_, err := os.Lstat(arg)
				if key, value, ok := strings.Cut(arg, "="); ok && err != nil {
					values = append(values, policy.Override{Key: key, Value: value})
					continue
				}
				ok, err := checkPolicy(e, arg)
				if err != nil {
					return err
				}
				good = good && ok
			}
			if good = checkValues(e, values) && good; !good {
				return cli.ErrTold
			}
			return nil
		},
	}
}

// checkValues checks values together, as if one container had them.
func checkValues(e verb.Env, values []policy.Override) bool {
	var problems policy.Problems
	for i, v := range values {
		key, err := policy.KnownKey(v.Key)
		if p := (policy.Problem{}); errors.As(err, &p) {
			problems = append(problems, p)
		} else if slices.ContainsFunc(values[:i], func(o policy.Override) bool { return o.Key == key }) {
			problems = append(problems, policy.Problem{Key: key, Reason: "is given twice"})
		}
		values[i].Key = key
	}
	if len(problems) == 0 {
		errors.As(policy.NewStore("", nil).Check(container.Container{}, values), &problems)
	}
	for _, p := range problems {
		fmt.Fprintln(e.Stderr, cli.Lines(p.String()))
	}
	if len(problems) > 0 {
		return false
	}
	for _, v := range values {
		fmt.Fprintf(e.Stdout, "%s = %s: good\n", v.Key, understood(v.Key, v.Value))
	}
	return true
}

// checkPolicy checks a file, or a directory as a whole.
func checkPolicy(e verb.Env, name string) (ok bool, err error) {
	st, err := os.Stat(name)
	if err != nil {
		return false, fmt.Errorf("policy: %w", err)
	}
	var p *policy.Policy
	var problems policy.Problems
	if st.IsDir() {
		p, err = policy.LoadDir(name)
		errors.As(err, &problems)
	} else {
		var data []byte
		if data, err = readPolicy(name); err != nil {
			return false, err
		}
		p, problems = policy.ParseFile(name, data)
	}
	for _, x := range problems {
		fmt.Fprintln(e.Stderr, cli.Lines(x.String()))
	}
	if p == nil {
		return false, nil
	}
	of := ""
	if st.IsDir() {
		of = fmt.Sprintf(" in %d files", len(p.Files()))
	}
	fmt.Fprintf(e.Stdout, "%s: good, %d policies%s\n", cli.ShowText(name), p.Len(), of)
	return true, nil
}

func readPolicy(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, policy.MaxFileSize+1))
	if err == nil && len(data) > policy.MaxFileSize {
		err = fmt.Errorf("%s is larger than %d bytes", name, policy.MaxFileSize)
	}
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return data, nil
}

func policyReloadVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Make the agent read its policy files again, and enforce what restore has undone",
		Args:  cli.NArgs(0, 0, ""),
	}
	out := cli.FormatFlag(cmd)
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, _ []string) error {
		st, err := c.Reload(cmd.Context())
		if err != nil {
			return err
		}
		err = out.Print(e.Stdout, st, func(w io.Writer) {
			if st.OK {
				fmt.Fprintf(w, "loaded %d files from %s\n", len(st.Files), cli.Show(st.Dir))
			}
			for _, p := range st.Problems {
				fmt.Fprintln(w, cli.Lines(p.Text))
			}
		})
		if err == nil && !st.OK {
			err = fmt.Errorf("%s:\n%s", lastGood(st), st.Error)
		}
		return err
	})
}

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
		name := u.Name
		for _, line := range cli.Fold(u.Forms, columns.Line-12) {
			fmt.Fprintf(w, "  %-8s  %s\n", name, line)
			name = ""
		}
	}
}

func setVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "set CONTAINER KEY=VALUE... KEY-...",
		SuggestFor: []string{"update", "limit", "label", "edit"},
		Short:      "Set policy for a running container by hand, and take it back",
		Long: `Set policy for a running container by hand, until the container ends. It overrides
files and labels, and KEY- takes it back. Keys and values are those of policy files
and labels. A command applies completely or not at all: if one value is not valid,
or a feature refuses it (bandwidth that no uplink has left), nothing changes. If the
values are set but hold only in part, the exit status is 1, and a sentence says what
does not hold. Only root and the group ` + api.Group + ` may use it.`,
		Example: `  fairlead set web-1 net.rate=50mbit net.weight=2
  fairlead set web-1 net.rate- netcpu=isolate
  fairlead explain web-1`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				printKeys(e.Stdout, keysFrom(""))
			}
			return cli.NArgs(2, 1000, "KEY=VALUE or KEY- of a CONTAINER")(cmd, args)
		},
	}
	out := cli.FormatFlag(cmd)
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if args[0] == "" {
			return cli.Usagef(`CONTAINER is ""`)
		}
		in, err := assignments(args[1:])
		if err != nil {
			return err
		}
		done, err := c.Set(cmd.Context(), args[0], in)
		err = cli.Answer(e.Env, out, done, err, func(w io.Writer, c api.Container) {
			fmt.Fprintf(w, "%s:\n", columns.Whom(c.Name, c.Source, c.ID))
			wasSet(w, c, in)
		})
		if err != nil {
			return err
		}
		return inForce(done, in)
	})
}

// assignments parses KEY=VALUE and KEY-.
func assignments(args []string) (api.SetRequest, error) {
	in := api.SetRequest{Set: map[string]string{}}
	for _, a := range args {
		key, value, sets := strings.Cut(a, "=")
		if !sets {
			name, back := strings.CutSuffix(a, "-")
			if !back || name == "" {
				return in, cli.Usagef("%q is neither KEY=VALUE nor KEY-", a)
			}
			in.Unset = append(in.Unset, name)
			continue
		}
		if key == "" {
			return in, cli.Usagef("%q: the key is missing", a)
		}
		if _, twice := in.Set[key]; twice {
			return in, cli.Usagef("%s is given twice", cli.ShowText(key))
		}
		in.Set[key] = value
	}
	return in, nil
}

// wasSet prints the new values of the keys, and the features that have not applied them.
func wasSet(w io.Writer, c api.Container, in api.SetRequest) {
	keys := slices.AppendSeq(slices.Clone(in.Unset), maps.Keys(in.Set))
	slices.Sort(keys)
	for _, key := range keys {
		key = "fairlead." + strings.TrimPrefix(key, "fairlead.")
		i := slices.IndexFunc(c.Policy, func(s api.Setting) bool { return s.Key == key })
		if i < 0 {
			fmt.Fprintf(w, "%s: nothing any more\n", key)
			continue
		}
		fmt.Fprintln(w, setting1(c.Policy[i], time.Now()))
	}
	for _, f := range concerned(c, in) {
		if f.State == api.StatePending {
			fmt.Fprintf(w, "%s: %s\n", cli.Show(f.Feature), stands(f, time.Now()))
		}
	}
}

// concerned returns the features that have a key in the request.
func concerned(c api.Container, in api.SetRequest) (list []api.FeatureStatus) {
	keys := slices.AppendSeq(slices.Clone(in.Unset), maps.Keys(in.Set))
	for _, f := range c.Features {
		if slices.ContainsFunc(keys, func(key string) bool {
			return policy.FeatureOf("fairlead."+strings.TrimPrefix(key, "fairlead.")) == f.Feature
		}) {
			list = append(list, f)
		}
	}
	return list
}

// inForce returns an error if the new values are not in force in full. Pending features are no
// error.
func inForce(c api.Container, in api.SetRequest) error {
	if len(in.Set) == 0 {
		return nil
	}
	var not []string
	for _, f := range concerned(c, in) {
		if f.State != api.StateDone && f.State != api.StatePending {
			not = append(not, fmt.Sprintf("%s: %s", f.Feature, stands(f, time.Now())))
		}
	}
	if len(not) == 0 {
		return nil
	}
	return fmt.Errorf("it is set, but does not hold in full: %s", strings.Join(not, "; "))
}
