// Package overlay contains the verb overlay and the verbs below it. It prints what the agent
// reports, and does not touch a network itself; main lists the verb.
package overlay

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
)

// Verbs returns the verbs of the feature.
func Verbs() []verb.Verb { return []verb.Verb{overlayVerb} }

// overlayPolicy is the file of one line that turns overlay on for all containers.
const overlayPolicy = `{match: {name: "*"}, set: {overlay: on}}`

func overlayVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "overlay [CONTAINER]",
		SuggestFor: []string{"vxlan", "geneve", "flannel", "tunnel"},
		Short:      "Show the overlay networks, and how many packets take the fast path",
		Long: `Show the overlay networks of this host and, where policy asks for it
(fairlead.overlay=on), how many packets take the fast path: over --interval, or
with --total since it was first in force. Of one container, show the way that its
packets take, and why.

  CONTAINERS  that are on the network; "2 of 3": so many have a fast path
  STATE       off, on, left alone (it cannot be accelerated), killed (by hand)
  FAST, SLOW  packets by path; slow is the kernel's own
  HIT RATE    the part of them that took the fast path
  SAVED       time that the fast path saves for a packet that is sent, as timed here
  WAY         slow; from a container fast; to it peer (straight into it), or end
              (to the host's end of its veth, with the queue and programs there)

--flows lists flows: fast, or the reason why the next packet will be slow.

kill stops the fast path of a network at once, until revive or the next boot.`,
		Example: `  fairlead overlay
  fairlead overlay web-1
  fairlead overlay --flows
  fairlead set web-1 overlay=on
  fairlead overlay kill flannel.1`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	flows := cmd.Flags().Bool("flows", false, fmt.Sprintf("list flows, at most %d", api.MaxOverlayFlows))
	cmd.AddCommand(overlaySwitchVerb(e, "kill", "Stop the fast path of a network at once", (*api.Client).KillOverlay),
		overlaySwitchVerb(e, "revive", "Let a network that was killed have its fast path again", (*api.Client).ReviveOverlay))
	return verb.Reads(e, cmd, "show what was counted since the fast path was first in force", func(c *api.Client, ref string, f *verb.ReadingFlags) verb.Readings[api.Overlay] {
		most := 0
		if *flows {
			most, f.Total = api.MaxOverlayFlows, true
		}
		return verb.Readings[api.Overlay]{
			Read:  func(ctx context.Context, _ time.Duration) (api.Overlay, error) { return c.Overlay(ctx, ref, most) },
			After: api.Overlay.After,
			Print: func(w io.Writer, o api.Overlay) {
				switch {
				case *flows:
					overlayFlows(w, o)
				case ref != "":
					overlayContainers(w, o)
				default:
					overlayNetworks(w, o)
				}
			},
		}
	})
}

func overlaySwitchVerb(e verb.Env, name, short string, do func(*api.Client, context.Context, string) (api.OverlayNetwork, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:     name + " NETWORK",
		Short:   short,
		Example: "  fairlead overlay " + name + " flannel.1",
		Args:    cli.NArgs(1, 1, "NETWORK"),
	}
	out := cli.FormatFlag(cmd)
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if args[0] == "" {
			return cli.Usagef(`NETWORK is ""`)
		}
		n, err := do(c, cmd.Context(), args[0])
		return cli.Answer(e.Env, out, n, err, overlayState)
	})
}

// overlayState prints the state of a network, and why.
func overlayState(w io.Writer, n api.OverlayNetwork) {
	text := fmt.Sprintf("%s is %s", cli.Show(n.Network), cli.Show(n.State))
	if n.Why != "" {
		text += ": " + cli.OneLine(n.Why)
	}
	columns.Note(w, text)
	if n.State == api.OverlayKilled {
		fmt.Fprintf(w, "  to end that: fairlead overlay revive %s\n", cli.Show(n.Network))
	}
}

func overlayNetworks(w io.Writer, o api.Overlay) {
	if len(o.Networks) == 0 {
		fmt.Fprintln(w, "This host is on no overlay network.")
		return
	}
	columns.Print(w, o.Networks,
		columns.Text("NETWORK", func(n api.OverlayNetwork) string { return n.Network }).Cut(28),
		columns.Text("KIND", func(n api.OverlayNetwork) string { return n.Kind }),
		columns.Number("VNI", func(n api.OverlayNetwork) string { return number(n.VNI) }),
		columns.Number("PORT", func(n api.OverlayNetwork) string { return number(uint64(n.Port)) }),
		columns.Text("FORM", func(n api.OverlayNetwork) string { return n.Form }),
		columns.Text("UPLINKS", func(n api.OverlayNetwork) string { return strings.Join(n.Uplinks, ",") }).Cut(16),
		columns.Text("CONTAINERS", func(n api.OverlayNetwork) string {
			if n.State == api.OverlayOn {
				return fmt.Sprintf("%d of %d", n.Accelerated, n.Containers)
			}
			return strconv.Itoa(n.Containers)
		}),
		columns.Text("STATE", func(n api.OverlayNetwork) string { return n.State }),
	)
	for _, n := range o.Networks {
		if n.State == api.OverlayLeftAlone || n.State == api.OverlayKilled {
			overlayState(w, n)
		}
	}
	if slices.ContainsFunc(o.Networks, overlayOff) {
		fmt.Fprintf(w, "\nThe fast path is off unless policy asks for it. For one container:\n"+
			"  fairlead set CONTAINER overlay=on\nFor all, this line in /etc/fairlead/policy.d/50-overlay.yaml:\n  %s\n", overlayPolicy)
	}
	for _, n := range o.Networks {
		if n.State == api.OverlayOn || n.State == api.OverlayKilled {
			overlayCounters(w, n, o)
		}
	}
}

func overlayOff(n api.OverlayNetwork) bool { return n.State == api.OverlayOff }

func number(n uint64) string { return columns.If(n > 0, strconv.FormatUint(n, 10)) }

// overlayCounters prints what the fast path of a network does.
func overlayCounters(w io.Writer, n api.OverlayNetwork, o api.Overlay) {
	fmt.Fprintf(w, "\n%s", cli.Show(n.Network))
	if !o.Since.IsZero() {
		fmt.Fprintf(w, ", over %s", columns.Span(o.Taken.Sub(o.Since)))
	}
	fmt.Fprintln(w)
	columns.Print(w, overlayDirections(n),
		columns.Plain("DIRECTION", func(d overlayDirection) string { return d.name }),
		columns.Number("FAST", func(d overlayDirection) string { return view.Scale(float64(d.Fast)) }),
		columns.Number("SLOW", func(d overlayDirection) string { return view.Scale(float64(d.Slow)) }),
		columns.Number("HIT RATE", func(d overlayDirection) string { return hitRate(d.OverlayPackets) }),
		columns.Number("BYTES FAST", func(d overlayDirection) string { return view.Scale(float64(d.FastBytes)) + "B" }),
		columns.Number("SAVED", func(d overlayDirection) string { return columns.If(d.Saved > 0, fmt.Sprintf("%.0fns", d.Saved)) }),
	)
	overlayReasons(w, n)

	var parts []string
	for _, t := range n.Tables {
		parts = append(parts, fmt.Sprintf("%s of %s %s", view.Scale(float64(t.Entries)), view.Scale(float64(t.Capacity)), cli.Show(t.Kind)))
	}
	if len(parts) > 0 {
		columns.Note(w, "entries: "+strings.Join(parts, ", "))
	}
	generation := fmt.Sprintf("generation: %d", n.Generation)
	if !n.Raised.IsZero() {
		generation += ", raised " + columns.Ago(n.Raised, o.Taken)
	}
	if n.RaisedBy != "" {
		generation += ": " + cli.OneLine(n.RaisedBy)
	}
	columns.Note(w, generation)
	parts = nil
	for _, e := range n.Evictions {
		parts = append(parts, fmt.Sprintf("%s %s", view.Scale(float64(e.Times)), cli.Show(e.Cause)))
	}
	if len(parts) > 0 {
		columns.Note(w, "forgotten: "+strings.Join(parts, ", "))
	}
}

// overlayDirection is one direction of a network, with its name.
type overlayDirection struct {
	name string
	api.OverlayTraffic
}

func overlayDirections(n api.OverlayNetwork) []overlayDirection {
	return []overlayDirection{{"egress", n.Egress}, {"ingress", n.Ingress}}
}

// overlayReasons prints why packets were slow, the most frequent reason first.
func overlayReasons(w io.Writer, n api.OverlayNetwork) {
	counts := map[string][2]uint64{}
	var reasons []string
	for i, d := range overlayDirections(n) {
		for _, r := range d.Reasons {
			of, known := counts[r.Reason]
			if !known {
				reasons = append(reasons, r.Reason)
			}
			of[i] += r.Packets
			counts[r.Reason] = of
		}
	}
	if len(reasons) == 0 {
		return
	}
	slices.SortFunc(reasons, func(a, b string) int {
		x, y := counts[a], counts[b]
		return cmp.Or(cmp.Compare(y[0]+y[1], x[0]+x[1]), strings.Compare(a, b))
	})
	columns.Print(w, reasons,
		columns.Text("SLOW BY", func(r string) string { return r }),
		columns.Number("EGRESS", func(r string) string { return view.Scale(float64(counts[r][0])) }),
		columns.Number("INGRESS", func(r string) string { return view.Scale(float64(counts[r][1])) }),
		columns.Text("BECAUSE", api.SlowText),
	)
}

func hitRate(p api.OverlayPackets) string {
	rate, ok := p.HitRate()
	return columns.If(ok, fmt.Sprintf("%.1f %%", 100*rate))
}

// overlayWay is the way of packets in one direction of a container's end.
type overlayWay struct {
	container, network, device, direction string
	api.OverlayWay
}

// overlayContainers prints which way the packets of containers take, and why they are slow.
func overlayContainers(w io.Writer, o api.Overlay) {
	var ways []overlayWay
	var notes []string
	said := make(map[string]bool) // reasons shown for both directions, which the network need not repeat
	for _, c := range o.Containers {
		for _, end := range c.Ends {
			for _, d := range []overlayWay{{direction: "egress", OverlayWay: end.Egress}, {direction: "ingress", OverlayWay: end.Ingress}} {
				d.container, d.network, d.device = columns.Name(c.Container, c.Name), end.Network, end.Device
				ways = append(ways, d)
				if d.Why != "" && end.Egress.Why != end.Ingress.Why {
					notes = append(notes, fmt.Sprintf("%s, %s, is %s: %s", cli.Show(end.Device), d.direction, cli.Show(d.Way), cli.OneLine(d.Why)))
				}
			}
			if end.Egress.Why == end.Ingress.Why && end.Egress.Why != "" {
				notes = append(notes, fmt.Sprintf("%s is %s: %s", cli.Show(end.Device), cli.Show(end.Egress.Way), cli.OneLine(end.Egress.Why)))
				said[end.Egress.Why] = true
			}
		}
	}
	if len(ways) == 0 {
		fmt.Fprintln(w, "This container is on no overlay network.")
		return
	}
	columns.Print(w, ways,
		columns.Plain("CONTAINER", func(d overlayWay) string { return d.container }).Cut(24),
		columns.Text("NETWORK", func(d overlayWay) string { return d.network }).Cut(28),
		columns.Text("DEVICE", func(d overlayWay) string { return d.device }),
		columns.Plain("DIRECTION", func(d overlayWay) string { return d.direction }),
		columns.Text("WAY", func(d overlayWay) string { return d.Way }),
		columns.Number("FAST", func(d overlayWay) string { return view.Scale(float64(d.Fast)) }),
		columns.Number("SLOW", func(d overlayWay) string { return view.Scale(float64(d.Slow)) }),
		columns.Number("HIT RATE", func(d overlayWay) string { return hitRate(d.OverlayPackets) }),
	)
	for _, note := range notes {
		columns.Note(w, note)
	}
	for _, n := range o.Networks {
		if n.State != api.OverlayOn && (n.Why == "" || !said[n.Why]) {
			overlayState(w, n)
		}
	}
	if slices.ContainsFunc(o.Networks, overlayOff) {
		fmt.Fprintf(w, "To turn it on: fairlead set %s overlay=on\n", cmp.Or(cli.ShowText(o.Containers[0].Name), api.Ref(o.Containers[0].Container)))
	}
}

func overlayFlows(w io.Writer, o api.Overlay) {
	if len(o.Flows) == 0 {
		fmt.Fprintln(w, "No flow is known.")
		return
	}
	const longest = len("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535")
	columns.Print(w, o.Flows,
		columns.Plain("CONTAINER", func(f api.OverlayFlow) string { return columns.Name(f.Container, f.Name) }).Cut(24),
		columns.Text("NETWORK", func(f api.OverlayFlow) string { return f.Network }).Cut(28),
		columns.Text("PROTO", func(f api.OverlayFlow) string { return f.Protocol }),
		columns.Text("LOCAL", func(f api.OverlayFlow) string { return at(f.Local, f.LocalPort) }).Cut(longest),
		columns.Text("REMOTE", func(f api.OverlayFlow) string { return at(f.Remote, f.RemotePort) }).Cut(longest),
		columns.Text("STATE", func(f api.OverlayFlow) string { return f.State }),
		columns.Number("LEASE", func(f api.OverlayFlow) string { return view.Brief(f.Age) }),
	)
	if o.MoreFlows > 0 {
		fmt.Fprintf(w, "and %d more\n", o.MoreFlows)
	}
}

// at formats an address and a port.
func at(address string, port int) string {
	return net.JoinHostPort(address, strconv.Itoa(port))
}
