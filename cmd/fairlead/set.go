package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
)

func setVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "set CONTAINER KEY=VALUE... KEY-...",
		Short: "Set policy for a running container by hand, and take it back",
		Long: `Set policy for a running container by hand, until the container ends. It overrides
files and labels, and KEY- takes it back. Keys and values are those of policy files
and labels. A command applies completely or not at all: if one value is not valid,
or a feature refuses it (bandwidth that no uplink has left), nothing changes. Only
root and the group ` + api.Group + ` may use it.`,
		Example: `  fairlead set web-1 net.rate=50mbit net.weight=2
  fairlead set web-1 net.rate- netcpu=isolate
  fairlead explain web-1`,
		Args: nargs(2, 1000, "CONTAINER, and KEY=VALUE or KEY-,"),
	}
	out := formatFlag(cmd)
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if args[0] == "" {
			return usagef(`CONTAINER is ""`)
		}
		in, err := assignments(args[1:])
		if err != nil {
			return err
		}
		done, err := c.Set(cmd.Context(), args[0], in)
		return answer(e, out, done, err, func(w io.Writer, c api.Container) {
			fmt.Fprintf(w, "%s:\n", whom(c.Name, c.Source, c.ID))
			wasSet(w, c, in)
		})
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
				return in, usagef("%q is neither KEY=VALUE nor KEY-", a)
			}
			in.Unset = append(in.Unset, name)
			continue
		}
		if key == "" {
			return in, usagef("%q: the key is missing", a)
		}
		if _, twice := in.Set[key]; twice {
			return in, usagef("%s is given twice", showText(key))
		}
		in.Set[key] = value
	}
	return in, nil
}

// whom names the container that a verb has changed something for.
func whom(name, source string, id container.ID) string {
	return fmt.Sprintf("%s (%s, id %s)", show(name), show(source), id)
}

// wasSet prints the values of the keys now, and the features that are not in force.
func wasSet(w io.Writer, c api.Container, in api.SetRequest) {
	keys := slices.Clone(in.Unset)
	for key := range in.Set {
		keys = append(keys, key)
	}
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
	for _, f := range c.Features {
		if f.State != api.StateDone {
			fmt.Fprintf(w, "%s: %s\n", show(f.Feature), stands(f, time.Now()))
		}
	}
}
