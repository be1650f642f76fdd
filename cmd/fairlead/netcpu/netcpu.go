// Package netcpu contains the verb netcpu, and the flags of its feature. It prints what the agent
// reports and measures nothing itself; main lists the verb.
package netcpu

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// Verbs returns the verbs of the feature.
func Verbs() []verb.Verb { return []verb.Verb{netcpuVerb} }

// Flags adds the agent's flags for the feature.
func Flags(s *pflag.FlagSet, c *agent.FeatureConfig) {
	s.Var(devices(&c.XDP), "netcpu-xdp", "a device whose driver drops packets that a container may not have (native XDP), before tc would; most drivers reset their queues when that begins (with the first container that needs it) and ends (with the agent); separate several by commas, or repeat the flag; default: tc everywhere")
}

// devices implements the flag --netcpu-xdp.
func devices(to *map[string]struct{}) verb.Pairs[struct{}] {
	parse := func(dev, _ string, given bool) (none struct{}, err error) {
		if given {
			return none, fmt.Errorf("%s has no value", dev)
		}
		return none, verb.CheckDevice(dev)
	}
	return verb.Pairs[struct{}]{To: to, Form: "device", Parse: parse, Format: func(struct{}) string { return "" }}
}

// netcpuFlags are the flags of the verb netcpu.
type netcpuFlags struct {
	*verb.ReadingFlags
	matrix, wide bool
}

func netcpuVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "netcpu [CONTAINER]",
		SuggestFor: []string{"cpu"},
		Short:      "Show whose packets take whose CPU time",
		Long: `Show whose packets take whose CPU time, for all containers or in detail for one.
The command reads the accounts twice, --interval apart, and shows rates in percent
of one CPU. --total shows CPU seconds since the agent began to count.

  TASKS         CPU time that the container's control group is charged for
  RECV, SEND    CPU time of its packets in softirqs and NAPI threads, wherever that
                ran; what its tasks do in the system call is in TASKS
  STOLEN        the part of TASKS that went into the packets of others
  TOOK          time of other containers, and of tasks of the host, that went into
                its packets
  PPS, NS/PKT   packets per second that were handled for it, and the mean time of
                one; a super-packet (GRO, TSO) counts as one
  HELD BACK BY  who took how much of its time; "own quota" is time for which its own
                CPU limit did not let it run, which is nobody else's doing

(system) are packets that belong to no container: for the host itself, ARP.

ENFORCED lists containers that are charged, or whose packets are dropped:

  LIMIT %       the quota in force, or the weight without a quota, in percent of what
                the owner has set
  BALANCE MS    CPU time that the container is owed; negative: that it owes
  DROPPED PPS   packets for it per second that were dropped before they were queued,
                because its budget was used up or its queue was full

UPLINK lists the devices at which such packets are dropped when they come from
outside: by xdp in the driver (see --netcpu-xdp of the agent), or by tc.

--matrix shows victims as rows and culprits as columns. It leaves out time that a
container's packets took from itself. ksoftirqd and the host's NAPI threads work for
everybody; what ran while a CPU was idle is nobody's loss.`,
		Example: `  fairlead netcpu
  fairlead netcpu --matrix --interval 10s
  fairlead netcpu web-1 --total
  fairlead netcpu --watch`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	var f netcpuFlags
	cmd.Flags().BoolVar(&f.matrix, "matrix", false, "show victims and culprits")
	cmd.Flags().BoolVarP(&f.wide, "wide", "w", false, "show all columns and whole names, even beyond the width of the terminal")
	return verb.Reads(e, cmd, "show what was counted since the agent began, not rates", func(c *api.Client, ref string, of *verb.ReadingFlags) verb.Readings[api.NetCPU] {
		f.ReadingFlags = of
		return verb.Readings[api.NetCPU]{
			Read:  func(ctx context.Context, _ time.Duration) (api.NetCPU, error) { return c.NetCPU(ctx, ref) },
			After: api.NetCPU.After,
			Print: func(w io.Writer, n api.NetCPU) { newNetcpuView(n, f).print(w, ref != "") },
		}
	})
}

// matrix prints victims as rows and culprits as columns.
func (v netcpuView) matrix(w io.Writer) {
	cells := make(map[string]map[api.ID]float64) // by victim and culprit
	sum := make(map[api.ID]float64)
	order := make(map[string]float64)
	for _, t := range v.n.Matrix {
		if !v.visible(t.Seconds) {
			continue
		}
		name := v.party(t)
		if cells[name] == nil {
			cells[name] = make(map[api.ID]float64)
		}
		cells[name][t.Culprit] += t.Seconds
		sum[t.Culprit] += t.Seconds
		order[name] = order[name] + t.Seconds
		if t.Victim == 0 || t.Kind == api.VictimPeer { // system time and peers, which are no loss, go below the containers
			order[name] = -float64(slices.Index([]string{api.VictimTask, api.VictimKsoftirqd, api.VictimNAPI, api.VictimPeer, api.VictimIdle}, t.Kind) + 1)
		}
	}
	if len(cells) == 0 {
		fmt.Fprintf(w, "In %s no packets took the time of anybody else.\n", v.over())
		v.throttled(w)
		return
	}
	victims := slices.SortedFunc(maps.Keys(cells), func(x, y string) int { return cmp.Or(cmp.Compare(order[y], order[x]), cmp.Compare(x, y)) })
	culprits := slices.SortedFunc(maps.Keys(sum), func(x, y api.ID) int { return cmp.Or(cmp.Compare(sum[y], sum[x]), cmp.Compare(x, y)) })
	shown := v.fit(victims, culprits, cli.Across(v.line(w), screen))

	table := []columns.Column[string]{columns.Plain("VICTIM \\ CULPRIT", func(name string) string { return name }).Cut(28)}
	for _, id := range shown {
		table = append(table, columns.Number(cli.Cut(v.names[id], v.most()), func(name string) string {
			x, ok := cells[name][id]
			return columns.If(ok, v.amount(x))
		}))
	}
	of := func(name string, list []api.ID) (all float64) {
		for _, id := range list {
			all += cells[name][id]
		}
		return all
	}
	rest := culprits[len(shown):]
	table = append(table,
		columns.Number(fmt.Sprintf("%d OTHERS", len(rest)), func(name string) string {
			others := of(name, rest)
			return columns.If(v.visible(others), v.amount(others))
		}).When(len(rest) > 0),
		columns.Number("ALL", func(name string) string { return v.amount(of(name, culprits)) }))
	fmt.Fprintln(w, v.unit())
	columns.Print(v.line(w), victims, table...)
	v.throttled(w)
}

// most is the maximum width of a culprit's name; 0 is no limit.
func (v netcpuView) most() int {
	if v.flags.wide {
		return 0
	}
	return 16
}

// fit returns the culprits with columns that fit the screen, the largest first.
func (v netcpuView) fit(victims []string, culprits []api.ID, screen int) []api.ID {
	const number = 7 // "12345.6"
	left := screen - 2 - number - 2 - number - 6
	widest := utf8.RuneCountInString("VICTIM \\ CULPRIT")
	for _, name := range victims {
		widest = max(widest, min(utf8.RuneCountInString(name), 28))
	}
	left -= widest
	for i, id := range culprits {
		left -= 2 + max(number, utf8.RuneCountInString(cli.Cut(v.names[id], v.most())))
		if left < 0 {
			return culprits[:i]
		}
	}
	return culprits
}

// throttled prints the containers that their own quota throttled, which are not in the matrix.
func (v netcpuView) throttled(w io.Writer) {
	first := true
	for _, a := range v.n.Accounts {
		if !v.visible(a.Throttled) {
			continue
		}
		if first {
			fmt.Fprintln(w)
			first = false
		}
		fmt.Fprintf(w, "Held back by its own quota, not by others: %s %s%s\n", cli.Cut(v.names[a.Container], 40), v.amount(a.Throttled), v.of())
	}
}
