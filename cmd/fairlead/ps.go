package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

func psVerb(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List the containers, and what is in force for each",
		Args:  nargs(0, 0, ""),
	}
	out := formatFlag(cmd)
	wide := cmd.Flags().BoolP("wide", "w", false, "show whole names, even beyond 100 characters a line")
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, _ []string) error {
		list, err := c.Containers(cmd.Context())
		if err != nil {
			return err
		}
		st, err := c.Status(cmd.Context())
		if err != nil {
			return err
		}
		return out.print(e.stdout, list, func(w io.Writer) { psTable(w, list, st, *wide) })
	})
}

func psTable(w io.Writer, list []api.Container, st api.Status, wide bool) {
	keys := slices.DeleteFunc(policy.Schema(), func(k policy.Key) bool { return k.Column == "" })
	columns := []column{{"CONTAINER", 24}, {"SOURCE", 10}, {"IMAGE", 20}}
	for _, k := range keys {
		columns = append(columns, column{k.Column, 7})
	}
	columns = append(columns, column{"STATUS", 11}, column{"INTERFACES", 18})
	if wide {
		for i := range columns {
			columns[i].max = 0
		}
	}
	var rows [][]string
	var notes []string
	for _, c := range list {
		status, trouble := standing(c)
		row := []string{show(c.Name), show(c.Source), show(c.Image)}
		for _, k := range keys {
			row = append(row, show(settingOf(c, k)))
		}
		rows = append(rows, append(row, status, interfacesOf(c)))
		for _, t := range trouble {
			notes = append(notes, fmt.Sprintf("%s: %s", cut(show(c.Name), 40), t))
		}
	}
	table(w, columns, rows)
	notes = append(notes, concerns(st)...)
	if len(notes) > 0 {
		fmt.Fprintln(w)
		for _, n := range notes {
			fmt.Fprintln(w, n)
		}
	}
}

// settingOf returns what holds for a container by a key of policy.
func settingOf(c api.Container, k policy.Key) string {
	i := slices.IndexFunc(c.Policy, func(s api.Setting) bool { return s.Key == "fairlead."+k.Name })
	if i < 0 {
		return k.Default
	}
	return c.Policy[i].Value
}

// standing puts the states of all features into one word, the worst, with what
// there is to say of it.
func standing(c api.Container) (word string, trouble []string) {
	worst := []string{api.StateDone, api.StateHeld, api.StateKept, api.StateUnavailable, api.StateNotBuilt, api.StatePending, api.StateError}
	rank := 0
	for _, f := range c.Features {
		if f.State == api.StateUnavailable && !asked(c, f.Feature) {
			continue
		}
		rank = max(rank, slices.Index(worst, f.State))
		switch f.State {
		case api.StateError:
			trouble = append(trouble, fmt.Sprintf("%s: %s (tried %d times)", show(f.Feature), oneLine(f.Error), f.Tries))
		case api.StateNotBuilt, api.StateUnavailable, api.StateKept:
			trouble = append(trouble, fmt.Sprintf("%s: %s: %s", show(f.Feature), f.State, oneLine(f.Error)))
		}
	}
	word = worst[rank]
	if word == api.StateNotBuilt {
		word = "partly"
	}
	return word, trouble
}

// asked says whether policy sets anything for a feature.
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
		name := showText(i.Name)
		if i.Host != nil && i.Host.Name != "" {
			name += "→" + showText(i.Host.Name)
		}
		names = append(names, name)
	}
	if len(names) == 0 {
		return "-"
	}
	return strings.Join(names, " ")
}

// concerns says what is wrong with the agent as a whole.
func concerns(st api.Status) []string {
	var out []string
	if !st.Complete {
		out = append(out, "not every source of containers has answered yet, so the list may be incomplete")
	}
	for _, s := range st.Sources {
		if s.Error != "" {
			out = append(out, fmt.Sprintf("source %s: %s", show(s.Name), oneLine(s.Error)))
		}
		if s.Partial && s.Name == "cgroup" {
			out = append(out, "source cgroup: there are more cgroups than are looked at; containers of Docker, Podman and containerd are not concerned")
		}
	}
	if !st.Policy.OK {
		out = append(out, "policy is not usable; the last good one is in force:\n"+lines(st.Policy.Error))
	}
	for _, p := range st.Policy.Problems {
		out = append(out, "policy: "+oneLine(p.Text))
	}
	for _, f := range st.Features {
		if f.Support.Level == probe.Degraded {
			out = append(out, fmt.Sprintf("feature %s is degraded: %s", show(f.Name), oneLine(f.Support.Why)))
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
