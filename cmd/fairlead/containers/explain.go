package containers

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
)

func explainVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "explain CONTAINER",
		SuggestFor: []string{"inspect", "show", "describe", "why", "get"},
		Short:      "Show what was changed on the host for a container, and why",
		Long: `Show what was changed on the host for a container, because of which line of
policy, with the value before and the value now. CONTAINER is, here and everywhere, a name,
a runtime's id or the start of one, or fairlead's id; a name counts before an id, and
id:NUMBER is always an id. A name that a table has cut will do with its "…". With --plan it shows what would be changed, whatever policy says now;
nothing is changed by that.`,
		Args: cli.NArgs(1, 1, "CONTAINER"),
	}
	out := cli.FormatFlag(cmd)
	all := cmd.Flags().BoolP("all", "a", false, "also show the settings that are at their defaults")
	plan := cmd.Flags().Bool("plan", false, "show what features would change on the host for the container")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if *plan {
			return explainPlan(e, out, cmd, c, args[0])
		}
		x, err := c.Explain(cmd.Context(), args[0])
		return cli.Answer(e.Env, out, x, err, func(w io.Writer, x api.Explanation) {
			now := time.Now()
			explainContainer(w, x, *all, now)
			explainDone(w, x, now)
		})
	})
}

// View returns the text of views about a container's policy and, with changes, about the changes.
func View(x api.Explanation, changes bool, now time.Time) string {
	var out strings.Builder
	explainContainer(&out, x, false, now)
	if changes {
		explainDone(&out, x, now)
	} else {
		fmt.Fprintln(&out, "\nWhat was changed on the host for it is not recorded.")
	}
	return out.String()
}

// explainContainer prints a container's description, policy and status.
func explainContainer(w io.Writer, x api.Explanation, all bool, now time.Time) {
	c := x.Container
	about := []string{cli.Show(c.Source), "id " + c.ID.String()}
	if c.Image != "" {
		image := "image " + cli.Show(c.Image)
		for _, name := range c.ImageNames {
			image += " = " + cli.Show(name)
		}
		about = append(about, image)
	}
	if c.Pod != "" {
		about = append(about, "pod "+cli.Show(c.Namespace)+"/"+cli.Show(c.Pod))
	}
	fmt.Fprintf(w, "%s (%s)\n", cli.Show(c.Name), strings.Join(about, ", "))
	if x.Ended {
		fmt.Fprintln(w, "  has ended")
	} else if c.PID != 0 {
		fmt.Fprintf(w, "  runs as process %d, started %s\n", c.PID, columns.Ago(c.Started, now))
	}
	explainNetwork(w, c)

	fmt.Fprintln(w, "\nWhat policy says:")
	said, defaults := 0, 0
	for _, s := range c.Policy {
		if s.From == "default" && !all {
			defaults++
			continue
		}
		said++
		fmt.Fprintf(w, "  %s\n", setting1(s, now))
	}
	switch {
	case said+defaults == 0:
		fmt.Fprintln(w, "  nothing")
	case said == 0:
		fmt.Fprintln(w, "  nothing: all is at its default (-a shows what that is)")
	}
	for _, p := range x.Problems {
		fmt.Fprintf(w, "  not usable: %s\n", cli.OneLine(p.Text))
	}

	fmt.Fprintln(w, "\nStatus:")
	for _, f := range c.Features {
		for i, line := range strings.Split(stands(f, now), "\n") { // all errors of the feature, each with its causes
			if i == 0 {
				line = cli.Show(f.Feature) + ": " + line
			}
			fmt.Fprintf(w, "  %s%s\n", strings.Repeat("    ", min(i, 1)), line)
		}
	}
}

// explainDone prints what was done for a container, and the evidence for it.
func explainDone(w io.Writer, x api.Explanation, now time.Time) {
	c := x.Container
	if len(x.Evidence) > 0 {
		fmt.Fprintln(w, "\nWhat was seen:")
	}
	for _, s := range x.Evidence {
		fmt.Fprintf(w, "  %s, %s: %s\n", cli.Show(s.Feature), columns.Ago(s.Time, now), cli.OneLine(s.Text))
	}

	if len(x.Changes) == 0 {
		fmt.Fprintln(w, "\nNothing was changed on the host for it.")
	}
	for _, group := range together(x.Changes) {
		fmt.Fprintf(w, "\nWhat %s changed on the host for it%s:\n", cli.Show(group[0].Feature), because(group[0]))
		explainChanges(w, c, group, now)
	}
	for _, group := range together(x.Host) {
		fmt.Fprintf(w, "\nWhat %s changed for the host as a whole:\n", cli.Show(group[0].Feature))
		explainChanges(w, c, group, now)
	}
}

// explainPlan shows the changes that features would make.
func explainPlan(e verb.Env, out *cli.Format, cmd *cobra.Command, c *api.Client, ref string) error {
	steps, err := c.Plan(cmd.Context(), ref)
	if err != nil {
		return err
	}
	x, err := c.Explain(cmd.Context(), ref) // for the names of its devices
	return cli.Answer(e.Env, out, steps, err, func(w io.Writer, steps []api.Planned) { printPlan(w, x.Container, steps) })
}

func printPlan(w io.Writer, of api.Container, steps []api.Planned) {
	if len(steps) == 0 {
		fmt.Fprintf(w, "No feature says beforehand what it would change for %s.\n", cli.Show(of.Name))
	}
	last := ""
	for _, s := range steps {
		if s.Feature != last {
			fmt.Fprintf(w, "What %s would change on the host for %s with %s = %s:\n",
				cli.Show(s.Feature), cli.Show(of.Name), cli.Show(s.Because.Key), cli.Show(s.Because.Value))
			last = s.Feature
		}
		if device, coming := strings.CutPrefix(s.Object, "napi/"); coming {
			fmt.Fprintf(w, "  control group of each kernel thread that will poll %s\n      would be %s\n", cli.Show(device), value(s.Value))
			continue
		}
		fmt.Fprintf(w, "  %s\n", objectText(of, s.Kind, s.Object, s.Device))
		if s.Now == s.Value {
			fmt.Fprintf(w, "      is %s already\n", value(s.Now))
		} else {
			fmt.Fprintf(w, "      is %s, would be %s\n", value(s.Now), value(s.Value))
		}
	}
}

// together groups changes by feature and reason.
func together(changes []api.Change) [][]api.Change {
	var groups [][]api.Change
	for _, c := range changes {
		i := slices.IndexFunc(groups, func(g []api.Change) bool {
			return g[0].Feature == c.Feature && slices.Equal(g[0].Because, c.Because)
		})
		if i < 0 {
			i, groups = len(groups), append(groups, nil)
		}
		groups[i] = append(groups[i], c)
	}
	return groups
}

func because(c api.Change) string {
	var reasons []string
	for _, s := range c.Because {
		reasons = append(reasons, cli.Show(s.Key)+" = "+cli.Show(s.Value))
	}
	if len(reasons) == 0 {
		return ""
	}
	return ", because of " + strings.Join(reasons, " and ")
}

func explainNetwork(w io.Writer, c api.Container) {
	switch {
	case c.HostNetwork:
		fmt.Fprintln(w, "  uses the host's network")
	case len(c.Interfaces) == 0:
		fmt.Fprintln(w, "  has no network device")
	}
	if c.Many {
		fmt.Fprintln(w, "  has more network devices or addresses than the agent examines; the others are left alone")
	}
	for _, i := range c.Interfaces {
		fmt.Fprintf(w, "  %s (%s)", cli.Show(i.Name), cli.Show(i.Kind))
		for _, a := range i.Addrs {
			fmt.Fprintf(w, " %s", cli.Show(a))
		}
		if i.Host != nil {
			fmt.Fprintf(w, ", other end %s", cli.Show(i.Host.Name))
			if i.Host.Master != "" {
				fmt.Fprintf(w, " on bridge %s", cli.Show(i.Host.Master))
			}
		}
		fmt.Fprintln(w)
	}
}

// setting1 formats a setting in one line.
func setting1(s api.Setting, now time.Time) string {
	from := s.From
	switch {
	case s.Line > 0:
		from = fmt.Sprintf("%s line %d", cli.ShowText(s.From), s.Line)
	case strings.HasPrefix(from, "set by "):
		from = cli.ShowText(from)
	case from == "default":
		from = "by default"
	case from == "label", from == "annotation":
		from = "by a " + from + " of the container"
		from = strings.Replace(from, "a ann", "an ann", 1)
	case from == "image label":
		from = "by a label of its image"
	case s.Reason != "":
		return fmt.Sprintf("%s = %s, by %s for %s, since %s:\n      %s", cli.Show(s.Key), cli.Show(s.Value), cli.ShowText(from),
			cli.OneLine(s.Instead), strings.TrimSuffix(columns.Ago(s.Since, now), " ago"), cli.OneLine(s.Reason))
	default:
		from = "by " + cli.ShowText(from)
	}
	return fmt.Sprintf("%s = %s, %s", cli.Show(s.Key), understood(s.Key, s.Value), from)
}

// understood formats a value of policy, as written and as parsed.
func understood(key, value string) string {
	if text := policy.Understood(key, value); text != "" {
		return cli.Show(value) + " (" + cli.ShowText(text) + ")"
	}
	return cli.Show(value)
}

func stands(f api.FeatureStatus, now time.Time) string {
	switch f.State {
	case api.StateDone:
		return "as policy says, since " + strings.TrimSuffix(columns.Ago(f.Since, now), " ago")
	case api.StatePending:
		return "waits to be applied"
	case api.StateHeld:
		return "undone by restore, until `fairlead policy reload`"
	case api.StateKept:
		return "as an earlier agent left it: " + cli.Lines(f.Error)
	case api.StateError:
		next := ""
		if f.Next.After(now) {
			next = fmt.Sprintf(", next try in %.1f s", f.Next.Sub(now).Seconds())
		}
		return fmt.Sprintf("failed %d times%s: %s", f.Tries, next, cli.Lines(f.Error))
	}
	if f.Error == "" {
		return cli.Show(f.State)
	}
	return cli.Show(f.State) + ": " + cli.Lines(f.Error)
}

func explainChanges(w io.Writer, of api.Container, changes []api.Change, now time.Time) {
	for _, c := range changes {
		fmt.Fprintf(w, "  %s\n", objectText(of, c.Kind, c.Object, c.Device))
		what := fmt.Sprintf("was %s, made %s %s", value(c.Before), value(c.Wrote), columns.Ago(c.When, now))
		switch c.State {
		case api.ChangeInForce:
			what += ", and so it is now"
		case api.ChangeUndone:
			what += ", and now it is as before"
		case api.ChangeForeign:
			what += fmt.Sprintf(", but somebody else has made it %s since", value(c.Now))
		case api.ChangeGone:
			what += "; it no longer exists"
		default:
			what += "; it cannot be read now: " + cli.OneLine(c.Error)
		}
		fmt.Fprintf(w, "      %s\n", what)
		if c.Asked != "" {
			fmt.Fprintf(w, "      %s alone asks for %s\n", cli.Show(c.Feature), value(c.Asked))
		}
		if !c.Expiry.IsZero() {
			fmt.Fprintf(w, "      until %s\n", c.Expiry.Format(time.TimeOnly))
		}
	}
}

func value(s string) string {
	return cmp.Or(cli.Cut(cli.ShowText(s), 40), `""`)
}

// objects describes the objects of devices and of kernel threads, by kind.
var deviceObjects, threadObjects = map[string]string{
	"offload":          "offload DETAIL of DEVICE",
	"threaded":         "threaded NAPI of DEVICE",
	"rps":              "packet steering (rps_cpus) of queue DETAIL of DEVICE",
	"rfs":              "flow steering (rps_flow_cnt) of queue DETAIL of DEVICE",
	"defer":            "delay of polls (DETAIL) of DEVICE",
	"qdisc":            "root qdisc of DEVICE",
	"txqueuelen":       "queue length of DEVICE",
	"ifb":              "device that takes in what arrives (IFB) of DEVICE",
	"pair":             "veth pair past the network namespace of DEVICE",
	"tc-filter":        "program PROGRAM at the HOOK hook of DEVICE",
	"forward-priority": "priority of forwarded packets (ip_forward_update_priority)",
	"sysfs":            "view of sysfs into the container's network",
}, map[string]string{
	"kthread":  "control group of kernel thread TID in HIERARCHY",
	"affinity": "allowed CPUs of kernel thread TID",
	"slice":    "slice, in ns, of kernel thread TID",
	"nice":     "nice value of kernel thread TID",
}

// objectText describes the object of a change in words. The journal names a device
// NETNS/INDEX/DETAIL, and a thread TID:START:HIERARCHY. Other names are kept. named is the device's
// name, if the agent knows it.
func objectText(c api.Container, kind, object, named string) string {
	if device, detail, ok := deviceText(c, object, named); ok && deviceObjects[kind] != "" {
		hook, program, _ := strings.Cut(detail, "/")
		return strings.NewReplacer("DEVICE", device, "DETAIL", cli.Show(detail), "HOOK", cli.Show(hook), "PROGRAM", cli.Show(program)).Replace(deviceObjects[kind])
	}
	tid, rest, ok := strings.Cut(object, ":")
	if _, err := strconv.Atoi(tid); err == nil && ok && threadObjects[kind] != "" {
		_, hierarchy, _ := strings.Cut(rest, ":")
		return strings.NewReplacer("TID", tid, "HIERARCHY", cli.Show(hierarchy)).Replace(threadObjects[kind])
	}
	if kind == "file" {
		return cli.Show(object)
	}
	return cli.Show(kind) + " " + cli.Show(object)
}

// deviceText names the device of an object NETNS/INDEX/DETAIL: a device of the container, the other
// end of one, or another device of the host.
func deviceText(c api.Container, object, named string) (device, detail string, ok bool) {
	parts := append(strings.SplitN(object, "/", 3), "")
	if len(parts) < 3 {
		return "", "", false
	}
	netns, err1 := strconv.ParseUint(parts[0], 10, 64)
	index, err2 := strconv.Atoi(parts[1])
	if err1 != nil || err2 != nil {
		return "", "", false
	}
	for _, i := range c.Interfaces {
		if c.NetNS != 0 && c.NetNS == netns && i.Index == index {
			return fmt.Sprintf("%s in the container", cli.Show(i.Name)), parts[2], true
		}
		if i.Host != nil && i.Host.NetNS == netns && i.Host.Index == index {
			return fmt.Sprintf("%s, the other end of %s", cli.Show(i.Host.Name), cli.Show(i.Name)), parts[2], true
		}
	}
	if named == "" {
		return "a device that is not seen any more", parts[2], true
	}
	return cli.Show(named), parts[2], true
}
