// Package containers contains the verbs about containers and their policy: ps, explain, set,
// restore, policy and keys. The report of a feature is in the package with the feature's name. Main
// lists the verbs; package views shows the output of explain.
package containers

import (
	"cmp"
	"fmt"
	"io"
	"regexp"
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

// Verbs returns the verbs of this package.
func Verbs() []verb.Verb {
	return []verb.Verb{psVerb, explainVerb, setVerb, restoreVerb, policyVerb, keysVerb}
}

func psVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "ps",
		SuggestFor: []string{"list", "ls", "status", "containers"},
		Short:      "List the containers, what slows each, and what is in force for it",
		Args:       cli.NArgs(0, 0, ""),
	}
	out := cli.FormatFlag(cmd)
	wide := cmd.Flags().BoolP("wide", "w", false, "show network devices, and whole names, even beyond the width of the terminal")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, _ []string) error {
		list, err := c.Containers(cmd.Context())
		if err != nil {
			return err
		}
		st, err := c.Status(cmd.Context())
		if err != nil {
			return err
		}
		o, err := c.Overview(cmd.Context())
		return cli.Answer(e.Env, out, list, err, func(w io.Writer, list []api.Container) { psTable(w, list, st, o, *wide) })
	})
}

// slowedBy says how much a container is slowed, and mainly by whom and what: "-" if that is less
// than half a percent, or unknown.
func slowedBy(id api.ID, o api.Overview) string {
	i := slices.IndexFunc(o.Rows, func(r api.OverviewRow) bool { return r.Container == id })
	if i < 0 || o.Rows[i].Slowed < 0.005 {
		return "-"
	}
	text := fmt.Sprintf("%.0f%%", 100*o.Rows[i].Slowed)
	for _, x := range o.Rows[i].By[:min(1, len(o.Rows[i].By))] {
		text += " " + cli.Show(x.Cause)
		if x.Name != "" {
			text += " " + cli.Show(x.Name)
		}
	}
	return text
}

func psTable(w io.Writer, list []api.Container, st api.Status, o api.Overview, wide bool) {
	table := []columns.Column[api.Container]{
		columns.Text("CONTAINER", func(c api.Container) string { return c.Name }).Cut(24),
		columns.Plain("SLOWED BY", func(c api.Container) string { return slowedBy(c.ID, o) }).Cut(22),
		columns.Text("SOURCE", func(c api.Container) string { return c.Source }).Cut(10),
	}
	for _, f := range st.Features {
		table = append(table, columns.Plain(strings.ToUpper(cli.Show(f.Name)), func(c api.Container) string { return standing(c, f.Name) }).Spare(!used(list, f.Name)))
	}
	columns.Print(cli.Wide(w, wide), list, append(table,
		columns.Text("IMAGE", func(c api.Container) string { return c.Image }).Rest(columns.Line).Spare(true),
		columns.Plain("INTERFACES", interfacesOf).When(wide))...)
	var notes []string
	failed := ""
	for _, c := range list {
		for _, t := range trouble(c) {
			notes = append(notes, fmt.Sprintf("%s: %s", cli.Cut(cli.Show(c.Name), 40), t))
			if failed == "" && plain.MatchString(c.Name) {
				failed = c.Name
			}
			failed = cmp.Or(failed, api.Ref(c.ID))
		}
	}
	notes = append(notes, concerns(st)...)
	if len(notes) == 0 {
		return
	}
	fmt.Fprintln(w)
	for _, n := range notes {
		for line := range strings.SplitSeq(n, "\n") {
			columns.Note(w, line)
		}
	}
	switch {
	case failed != "":
		fmt.Fprintf(w, "What to do: `fairlead explain %s`, then `fairlead doctor`.\n", failed)
	case !st.Policy.OK || len(st.Policy.Problems) > 0:
		fmt.Fprintln(w, "What to do: mend what is named above; `fairlead policy check` tries it first.")
	case slices.ContainsFunc(st.Features, func(f api.Feature) bool { return f.Support.Mendable() }),
		slices.ContainsFunc(st.Sources, func(s api.SourceStatus) bool { return s.Error != "" }):
		fmt.Fprintln(w, "What to do: `fairlead doctor` says what this host lacks and what would mend it.")
	}
}

// used reports whether policy asks a feature for anything, or the feature has a problem.
func used(list []api.Container, feature string) bool {
	return slices.ContainsFunc(list, func(c api.Container) bool {
		return asked(c, feature) || slices.ContainsFunc(c.Features, func(f api.FeatureStatus) bool {
			return f.Feature == feature && f.State != api.StateDone && f.State != api.StateUnavailable
		})
	})
}

// plain is a short name that needs no quoting in a shell.
var plain = regexp.MustCompile(`^[A-Za-z0-9_./][A-Za-z0-9_./-]{0,23}$`)

// settingOf returns the parsed value of a policy key for a container.
func settingOf(c api.Container, k policy.Key) string {
	i := slices.IndexFunc(c.Policy, func(s api.Setting) bool { return s.Key == "fairlead."+k.Name })
	if i < 0 {
		return k.Default
	}
	return cmp.Or(policy.Understood(k.Name, c.Policy[i].Value), c.Policy[i].Value)
}

// standing formats the state of a feature for a container: the values of the feature's main
// keys, and whether they are in force.
func standing(c api.Container, feature string) string {
	var words []string
	for _, k := range policy.Schema() {
		if k.Feature == feature && k.Column {
			words = append(words, cli.Show(settingOf(c, k)))
		}
	}
	i := slices.IndexFunc(c.Features, func(f api.FeatureStatus) bool { return f.Feature == feature })
	switch {
	case i < 0:
		return "-"
	case !asked(c, feature) && (c.Features[i].State == api.StateUnavailable || c.Features[i].State == api.StateDone && len(words) == 0):
		return "-"
	default:
		words = append(words, cli.Show(c.Features[i].State))
	}
	return strings.Join(words, " ")
}

// trouble lists the features that are not in the state that policy wants.
func trouble(c api.Container) (list []string) {
	for _, f := range c.Features {
		switch {
		case f.State == api.StateError:
			list = append(list, fmt.Sprintf("%s: %s (tried %d times)", cli.Show(f.Feature), cause(f), f.Tries))
		case f.State == api.StateUnavailable && !asked(c, f.Feature):
		case f.State == api.StatePartly:
			list = append(list, fmt.Sprintf("%s: %s", cli.Show(f.Feature), cli.OneLine(strings.TrimPrefix(f.Error, f.Feature+": "))))
		case f.State == api.StateDone, f.State == api.StatePending, f.State == api.StateHeld:
		default: // an agent of another version may use other words
			list = append(list, fmt.Sprintf("%s: %s: %s", cli.Show(f.Feature), cli.Show(f.State), cli.OneLine(f.Error)))
		}
	}
	return list
}

// wrapping matches the parts of an error that name a step of the program or a kernel object.
var wrapping = regexp.MustCompile(`^(turn .*|.* of device [0-9]+ in netns [0-9]+)$`)

// cause says in one sentence why a feature does not do what policy asks for: the feature's first
// error, without the program's steps. explain shows all errors.
func cause(f api.FeatureStatus) string {
	first, rest, more := strings.Cut(strings.TrimRight(f.Error, "\n"), "\n")
	var parts []string
	for i, part := range strings.Split(first, ": ") {
		if i == 0 && (part == f.Feature || strings.HasPrefix(part, f.Feature+" ")) || wrapping.MatchString(part) {
			continue
		}
		parts = append(parts, part)
	}
	text := cli.Cut(cli.OneLine(strings.Join(parts, ": ")), 200)
	if more {
		text += fmt.Sprintf(", and %d more", strings.Count(rest, "\n")+1)
	}
	return text
}

// asked reports whether policy sets anything for a feature.
func asked(c api.Container, feature string) bool {
	return slices.ContainsFunc(c.Policy, func(s api.Setting) bool {
		return s.From != "default" && policy.FeatureOf(s.Key) == feature
	})
}

func interfacesOf(c api.Container) string {
	if c.HostNetwork {
		return "(the host's)"
	}
	var names []string
	for _, i := range c.Interfaces {
		name := cli.ShowText(i.Name)
		if i.Host != nil && i.Host.Name != "" {
			name += "→" + cli.ShowText(i.Host.Name)
		}
		names = append(names, name)
	}
	return cmp.Or(strings.Join(names, " "), "-")
}

// lastGood describes the policy in force while the policy files are invalid.
func lastGood(st api.PolicyStatus) string {
	if st.Loaded.IsZero() {
		return "policy is not usable, and there is no last good one: neither files nor labels are in force"
	}
	return "policy is not usable; the last good one is in force, loaded at " + st.Loaded.Local().Format(time.DateTime)
}

// concerns lists the problems of the agent as a whole.
func concerns(st api.Status) []string {
	var out []string
	if !st.Complete {
		out = append(out, "not every source of containers has answered yet, so the list may be incomplete")
	}
	for _, s := range st.Sources {
		if s.Error != "" {
			out = append(out, fmt.Sprintf("source %s: %s", cli.Show(s.Name), cli.OneLine(s.Error)))
		}
		if s.Partial && s.Name == "cgroup" {
			out = append(out, "source cgroup: there are more cgroups, or more changes to them, than are looked at; containers of Docker, Podman, containerd and CRI-O are not concerned")
		}
	}
	if st.Recording != nil && st.Recording.Error != "" {
		out = append(out, "nothing is recorded: "+cli.OneLine(st.Recording.Error))
	}
	if !st.Policy.OK {
		out = append(out, lastGood(st.Policy)+":\n"+cli.Lines(st.Policy.Error))
	}
	for _, p := range st.Policy.Problems {
		out = append(out, "policy: "+cli.OneLine(p.Text))
	}
	for _, f := range st.Features {
		// doctor reports the limitations that need no remedy.
		if f.Support.Level == api.LevelDegraded && f.Support.Mendable() {
			out = append(out, fmt.Sprintf("feature %s is degraded: %s", cli.Show(f.Name), cli.OneLine(f.Support.Why)))
		}
	}
	switch {
	case st.HeldAll:
		out = append(out, "restore has undone everything; `fairlead policy reload` enforces policy again")
	case len(st.Held) > 0:
		out = append(out, fmt.Sprintf("restore has undone everything for %d containers; `fairlead policy reload` enforces policy again", len(st.Held)))
	}
	return out
}
