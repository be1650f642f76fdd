package containers

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
)

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
			if len(args) == 0 {
				printKeys(e.Stdout, keysFrom(""))
			}
			return cli.NArgs(2, 1000, "CONTAINER, and KEY=VALUE or KEY-,")(cmd, args)
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

// wasSet prints the new values of the keys, and the features that are not in force.
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
