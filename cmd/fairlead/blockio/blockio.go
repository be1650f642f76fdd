// Package blockio contains the verbs io and reserve, and the flags of their feature. It measures a
// disk for io calibrate; everything else comes from the agent. Main lists its verbs.
package blockio

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead-project/fairlead/agent"
	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/view"
)

// Verbs returns the verbs of the feature.
func Verbs() []verb.Verb { return []verb.Verb{blockioVerb, reserveVerb} }

// Flags adds the agent's flags for the feature.
func Flags(s *pflag.FlagSet, c *agent.FeatureConfig) {
	s.Var(namedDisks((*map[string]string)(&c.Disks)), "kubelet-disk", "a disk of known capacity whose reads and writes kubelet is offered, as NAME=/dev/vdb: pods request fairlead.dev/NAME-riops and -wiops; separate several by commas, or repeat the flag; default: none")
	s.StringVar(&c.DiskCapacities, "disk-capacities", "/var/lib/fairlead/disk-capacities.json", "file of what disks can do, as io calibrate measured or io capacity gave it; empty: it is forgotten when the agent ends")
}

func blockioVerb(e verb.Env) *cobra.Command {
	var over time.Duration
	var devices, verbose bool
	cmd := &cobra.Command{
		Use:        "io [CONTAINER]",
		SuggestFor: []string{"blockio", "disk", "storage"},
		Short:      "Show what block I/O containers have reserved and get, and who is in the way",
		Long: `Show what block I/O containers have reserved and get, and who is in the way: of all
containers, or of one, over a second, or as --over says.

  RESERVED    reads and writes per second (r, w), or bytes per second (rb, wb)
  ACHIEVED    the same, as it was
  QUEUE P99   99 % of the requests waited no longer before they went to the device
  DEVICE P99  99 % of them took the device no longer
  CPU P99     99 % of its tasks waited no longer for a CPU
  STATE       idle, met, asks less, short, throttled, stolen, interference, lost; or best effort
  CULPRIT     who is in the way
  ACTION      what is done to a container for the sake of others
  AGE         of the state, or the action

(host) is what belongs to no container, buffered writes among it that the kernel
does not attribute.`,
		Example: `  fairlead io
  fairlead io db-1 --over 10s
  fairlead io --devices
  fairlead io calibrate /dev/vdb --scratch /srv
  fairlead reserve db-1 /dev/vdb riops=2000 wiops=500`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	out := cli.FormatFlag(cmd)
	cmd.Flags().DurationVar(&over, "over", time.Second, "measure for so long")
	cmd.Flags().BoolVar(&devices, "devices", false, "show the disks: capacity, what is reserved, scheduler")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "also show context switches, what CPUs were waited for, pressure, and interrupts; of one container, its threads")
	cmd.AddCommand(blockioEventsVerb(e), blockioCalibrateVerb(e), blockioCapacityVerb(e))
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		if over < verb.MinInterval || over > api.MaxOver {
			return cli.Usagef("--over %v: it is %v to %v", over, verb.MinInterval, api.MaxOver)
		}
		ref := ""
		if len(args) > 0 {
			if ref = args[0]; ref == "" {
				return cli.Usagef(`CONTAINER is ""`)
			}
		}
		b, err := c.BlockIO(cmd.Context(), ref, over)
		return cli.Answer(e.Env, out, b, err, func(w io.Writer, b api.BlockIO) {
			if devices {
				blockioDevices(w, b)
			} else {
				blockioTable(w, b, time.Now())
			}
			if verbose {
				blockioDetail(w, b)
			}
		})
	})
}

func blockioTable(w io.Writer, b api.BlockIO, now time.Time) {
	if len(b.Rows) == 0 {
		fmt.Fprintln(w, "No block I/O, and nothing is reserved.")
		return
	}
	columns.Print(w, b.Rows,
		columns.Plain("CONTAINER", func(r api.BlockIORow) string {
			if r.Container == 0 {
				return "(host)"
			}
			return columns.Name(r.Container, r.Name)
		}).Cut(24),
		columns.Text("DISK", func(r api.BlockIORow) string { return r.Disk }),
		columns.Text("RESERVED", func(r api.BlockIORow) string { return figuresText(*cmp.Or(r.Reserved, new(api.BlockIOFigures))) }),
		columns.Text("ACHIEVED", func(r api.BlockIORow) string { return figuresText(r.Achieved) }),
		columns.Text("QUEUE P99", func(r api.BlockIORow) string { return quantile(r.QueueP99) }),
		columns.Text("DEVICE P99", func(r api.BlockIORow) string { return quantile(r.DeviceP99) }),
		columns.Text("CPU P99", func(r api.BlockIORow) string { return quantile(r.WaitP99) }),
		columns.Text("STATE", func(r api.BlockIORow) string { return r.State }),
		columns.Text("CULPRIT", func(r api.BlockIORow) string { return r.By }).Cut(24),
		columns.Text("ACTION", func(r api.BlockIORow) string { return r.Action }),
		columns.Text("AGE", func(r api.BlockIORow) string { return columns.If(!r.Since.IsZero(), columns.Ago(r.Since, now)) }),
	)
	admissions(w, b.Reservations)
	for _, r := range b.Rows {
		if r.Reserved != nil && r.Evidence != "" {
			fmt.Fprintf(w, "%s: %s\n", cli.Show(r.Name), cli.OneLine(strings.TrimSuffix(r.Evidence+"; "+r.Mend, "; ")))
		}
	}
	if b.Lost > 0 {
		fmt.Fprintf(w, "A table in the kernel is full: %d requests and waits are in no figure.\n", b.Lost)
	}
	for _, r := range b.Realtime {
		fmt.Fprintf(w, "%s: real-time for %s in each second of each CPU (%s): %d threads, %d ordinary, %d by their own doing %s\n",
			cli.Show(r.Name), view.Brief(r.Budget), cli.Show(r.Way), r.Promoted, r.Others, r.Own, cli.OneLine(r.Refused))
	}
}

// admissions prints the advice on reservations, the state of their admission, and their cost.
func admissions(w io.Writer, list []api.Reservation) {
	for _, r := range list {
		if r.Advice != "" {
			fmt.Fprintf(w, "%s: admission %s: %s\n", cli.Show(r.Name), cli.Show(r.Admission), cli.OneLine(r.Advice))
		}
		if r.CPU > 0 {
			fmt.Fprintf(w, "%s: what is reserved takes %.2f CPUs, by what it uses now\n", cli.Show(r.Name), r.CPU)
		}
	}
}

func quantile(sec float64) string { return columns.If(sec != 0, view.Brief(sec)) }

// figuresText formats figures briefly; "" if there are none.
func figuresText(f api.BlockIOFigures) string {
	var parts []string
	for _, x := range []struct {
		n    uint64
		unit string
	}{{f.ReadIOPS, "r"}, {f.WriteIOPS, "w"}, {f.ReadBytes, "rb"}, {f.WriteBytes, "wb"}} {
		if x.n > 0 {
			parts = append(parts, view.Scale(float64(x.n))+x.unit)
		}
	}
	return strings.Join(parts, " ")
}

func blockioDevices(w io.Writer, b api.BlockIO) {
	if len(b.Devices) == 0 {
		fmt.Fprintln(w, "No disk has I/O or a reservation.")
		return
	}
	columns.Print(w, b.Devices,
		columns.Text("DISK", func(d api.BlockIODevice) string { return d.Disk }),
		columns.Plain("NUMBER", func(d api.BlockIODevice) string { return d.Number }),
		columns.Text("CAPACITY", func(d api.BlockIODevice) string { return cmp.Or(figuresText(d.Capacity), "not known") }),
		columns.Text("ONE AT A TIME", func(d api.BlockIODevice) string { return figuresText(d.Depth1) }),
		columns.Text("SEEN", func(d api.BlockIODevice) string { return figuresText(d.Seen) }),
		columns.Text("RESERVED", func(d api.BlockIODevice) string { return percent(d.Reserved) }),
		columns.Text("HEADROOM", func(d api.BlockIODevice) string { return percent(d.Headroom) }),
		columns.Text("SCHEDULER", func(d api.BlockIODevice) string { return d.Scheduler }),
		columns.Text("SUPPORT", func(d api.BlockIODevice) string { return d.Support }),
	)
	for _, d := range b.Devices {
		fmt.Fprintf(w, "%s: capacity %s\n", cli.Show(d.Disk), cli.OneLine(d.Basis))
		for _, x := range d.Realtime {
			fmt.Fprintf(w, "%s: real-time for %s in each second of each CPU: %sr, or %sw\n", cli.Show(d.Disk), view.Brief(x.Budget), view.Scale(float64(x.ReadIOPS)), view.Scale(float64(x.WriteIOPS)))
		}
	}
}

func blockioEventsVerb(e verb.Env) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "events [CONTAINER]",
		Short: "Show when somebody was in the way of a reservation, and what was done",
		Example: `  fairlead io events db-1
  fairlead io events --follow -o json     # a line for each, until Ctrl-C`,
		Args: cli.NArgs(0, 1, "one CONTAINER"),
	}
	out := cli.FormatFlag(cmd)
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens, until Ctrl-C")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		b, err := c.BlockIO(cmd.Context(), strings.Join(args, ""), 0)
		if err != nil {
			return err
		}
		if !follow {
			return out.Print(e.Stdout, b.Events, func(w io.Writer) { blockioEvents(w, b.Events) })
		}
		concerns := func(api.BlockIOEvent) bool { return true }
		if len(args) > 0 {
			all, err := c.Explain(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			id := all.Container.ID
			concerns = func(x api.BlockIOEvent) bool { return x.Victim == id || x.Culprit == id }
		}
		missed := func(n uint64) { fmt.Fprintf(e.Stderr, "%d events are not remembered any more\n", n) }
		for x, err := range c.FollowBlockIO(cmd.Context(), 0, missed) {
			if errors.Is(err, context.Canceled) {
				return nil // an interrupt ends it normally
			}
			if err != nil {
				return err
			}
			if !concerns(x) {
				continue
			}
			if err := out.Line(e.Stdout, x, func(w io.Writer) {
				fmt.Fprintf(w, "%s  %-12s  %s  %s  %s\n", x.Time.Local().Format(time.DateTime), cli.Show(x.What), cli.Show(x.Name), cli.Show(x.Disk), cli.OneLine(x.Text))
			}); err != nil {
				return err
			}
		}
		return errors.New("the agent has ended")
	})
}

func blockioEvents(w io.Writer, events []api.BlockIOEvent) {
	if len(events) == 0 {
		fmt.Fprintln(w, "Nothing has happened.")
		return
	}
	columns.Print(w, events,
		columns.Plain("TIME", func(x api.BlockIOEvent) string { return x.Time.Local().Format(time.DateTime) }),
		columns.Text("WHAT", func(x api.BlockIOEvent) string { return x.What }),
		columns.Text("RESERVED BY", func(x api.BlockIOEvent) string { return x.Name }).Cut(24),
		columns.Text("DISK", func(x api.BlockIOEvent) string { return x.Disk }),
		columns.Plain("TEXT", func(x api.BlockIOEvent) string { return cli.OneLine(x.Text) }),
	)
}

func blockioCapacityVerb(e verb.Env) *cobra.Command {
	var headroom float64
	cmd := &cobra.Command{
		Use:   "capacity DEVICE FIGURE...",
		Short: "Say what a device can do",
		Long: `Say what a device can do: riops=N and wiops=N, in operations of 4 KiB at random
places, each alone; and, for reservations of bytes, and for operations that are
larger, rbps=SIZE and wbps=SIZE. The agent keeps
it in its file --disk-capacities, which outlives the boot.`,
		Example: `  fairlead io capacity /dev/vdb riops=20000 wiops=8000 rbps=400mb wbps=200mb`,
		Args:    cli.NArgs(2, 5, "DEVICE and FIGURE"),
	}
	out := cli.FormatFlag(cmd)
	cmd.Flags().Float64Var(&headroom, "headroom", 0.1, "part of it that is never reserved")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		figures, err := parseFigures(args[1:])
		if err != nil {
			return err
		}
		return showCapacity(cmd, c, e, out, api.CapacityRequest{Device: args[0], Headroom: headroom, BlockIOFigures: figures})
	})
}

func showCapacity(cmd *cobra.Command, c *api.Client, e verb.Env, out *cli.Format, in api.CapacityRequest) error {
	d, err := c.SetCapacity(cmd.Context(), in)
	return cli.Answer(e.Env, out, d, err, func(w io.Writer, d api.BlockIODevice) {
		blockioDevices(w, api.BlockIO{Devices: []api.BlockIODevice{d}})
	})
}

// parseFigures parses arguments such as riops=2000 wbps=20mb.
func parseFigures(args []string) (f api.BlockIOFigures, err error) {
	for _, a := range args {
		name, text, ok := strings.Cut(a, "=")
		to := map[string]*uint64{"riops": &f.ReadIOPS, "wiops": &f.WriteIOPS, "rbps": &f.ReadBytes, "wbps": &f.WriteBytes}[name]
		if !ok || to == nil {
			return f, cli.Usagef("%q is none of riops=N, wiops=N, rbps=SIZE, wbps=SIZE", a)
		}
		if *to != 0 {
			return f, cli.Usagef("%s is given twice", name)
		}
		var n uint64
		if strings.HasSuffix(name, "iops") {
			if n, err = strconv.ParseUint(text, 10, 63); err != nil {
				err = errors.New("want a whole number of operations per second")
			}
		} else {
			n, err = policy.ParseSize(text)
		}
		if err == nil && n == 0 {
			err = errors.New("is 0")
		}
		if err != nil {
			return f, cli.Usagef("%s=%q: %w", name, text, err)
		}
		*to = n
	}
	return f, nil
}

// namedDisks implements the flag --kubelet-disk.
func namedDisks(to *map[string]string) verb.Pairs[string] {
	parse := func(name, device string, _ bool) (string, error) {
		if slices.Contains(slices.Collect(maps.Values(*to)), device) {
			return "", errors.New(name + "=" + device + ": the name or the disk is given twice")
		}
		return device, errors.Join(policy.CheckDiskName(name), policy.CheckDisk(device))
	}
	return verb.Pairs[string]{To: to, Form: "name=device", Parse: parse, Format: func(device string) string { return device }}
}

// blockioDetail prints how the watched containers competed for CPUs, and what interrupted
// the CPUs.
func blockioDetail(w io.Writer, b api.BlockIO) {
	names := make(map[api.ID]string)
	watched := slices.DeleteFunc(slices.Clone(b.Rows), func(r api.BlockIORow) bool {
		_, seen := names[r.Container] // its rows for other disks are the same
		names[r.Container] = r.Name
		return seen || r.Container == 0 || r.Voluntary+r.Involuntary == 0 && r.CPUPressure == 0
	})
	columns.Below(w, watched,
		columns.Text("CONTAINER", func(r api.BlockIORow) string { return r.Name }).Cut(24),
		columns.Text("VOLUNTARY", func(r api.BlockIORow) string { return view.Scale(float64(r.Voluntary)) }),
		columns.Text("INVOLUNTARY", func(r api.BlockIORow) string { return view.Scale(float64(r.Involuntary)) }),
		columns.Text("I_CPU", func(r api.BlockIORow) string { return two(r.ICPU) }),
		columns.Text("OF OTHERS", func(r api.BlockIORow) string { return two(r.ICPUForeign) }),
		columns.Text("OF ITSELF", func(r api.BlockIORow) string { return two(r.ICPUOwn) }),
		columns.Text("WAITED FOR OTHERS", func(r api.BlockIORow) string { return quantile(r.WaitForeign) }),
		columns.Text("CPU PRESSURE", func(r api.BlockIORow) string { return percent(r.CPUPressure) }),
		columns.Text("IO PRESSURE", func(r api.BlockIORow) string { return percent(r.IOPressure) }),
		columns.Text("THROTTLED", func(r api.BlockIORow) string { return quantile(r.Throttled) }),
	)
	columns.Below(w, b.Waits,
		columns.Text("WAITED", func(x api.BlockIOWait) string { return names[x.Victim] }).Cut(24),
		columns.Text("WHILE THERE RAN", func(x api.BlockIOWait) string { return x.Name }).Cut(24),
		columns.Text("IN EACH SECOND", func(x api.BlockIOWait) string { return view.Brief(x.Share) }),
	)
	columns.Below(w, b.Threads,
		columns.Text("THREAD", func(t api.BlockIOThread) string { return strconv.Itoa(t.TID) }),
		columns.Text("VOLUNTARY", func(t api.BlockIOThread) string { return strconv.FormatUint(t.Voluntary, 10) }),
		columns.Text("INVOLUNTARY", func(t api.BlockIOThread) string { return strconv.FormatUint(t.Involuntary, 10) }),
	)
	columns.Below(w, b.Interrupts,
		columns.Text("SOURCE", func(i api.BlockIOInterrupts) string { return i.Source }),
		columns.Text("KIND", func(i api.BlockIOInterrupts) string {
			switch {
			case i.Soft:
				return "softirq"
			case i.Number > 0:
				return "interrupt " + strconv.Itoa(i.Number)
			}
			return "interrupt"
		}),
		columns.Plain("PER SECOND, BY CPU", func(i api.BlockIOInterrupts) string {
			var each []string
			for _, n := range i.CPUs {
				each = append(each, view.Scale(n))
			}
			return strings.Join(each, " ")
		}),
	)
	if b.Stolen > 0.005 {
		fmt.Fprintf(w, "\nThe hypervisor let CPUs wait for %s in each second.\n", view.Brief(b.Stolen))
	}
}

func two(n float64) string { return columns.If(n != 0, strconv.FormatFloat(n, 'f', 2, 64)) }

func percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }

func reserveVerb(e verb.Env) *cobra.Command {
	var end string
	cmd := &cobra.Command{
		Use:   "reserve [CONTAINER DEVICE FIGURE...]",
		Short: "Reserve block I/O for a running container, list and end reservations",
		Long: `Reserve block I/O of a device for a running container, until it ends. A FIGURE is
riops=N or wiops=N (operations per second), rbps=SIZE or wbps=SIZE (bytes per
second). What the container has reserved there is replaced. Without arguments,
all reservations are listed. Only root and the group ` + api.Group + ` may reserve.`,
		Example: `  fairlead reserve db-1 /dev/vdb riops=2000 wbps=20mb
  fairlead reserve
  fairlead reserve --end 4711-254-16`,
		Args: func(_ *cobra.Command, args []string) error {
			if n := len(args); n == 1 || n == 2 || n > 0 && end != "" {
				return cli.Usagef("want CONTAINER, DEVICE and at least one FIGURE, or --end and nothing else")
			}
			return nil
		},
	}
	out := cli.FormatFlag(cmd)
	cmd.Flags().StringVar(&end, "end", "", "end the reservation with this id")
	return verb.Dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, args []string) error {
		switch {
		case end != "":
			r, err := c.DeleteReservation(cmd.Context(), end)
			return cli.Answer(e.Env, out, r, err, func(w io.Writer, r api.Reservation) {
				fmt.Fprintf(w, "%s (id %s) no longer has %s of %s\n", cli.Show(r.Name), r.Container, cli.Show(figuresText(r.Reserved)), cli.Show(r.Device))
			})
		case len(args) == 0:
			list, err := c.Reservations(cmd.Context())
			return cli.Answer(e.Env, out, list, err, func(w io.Writer, r api.Reservations) { reservationTable(w, r.Reservations) })
		}
		figures, err := parseFigures(args[2:])
		if err != nil {
			return err
		}
		done, err := c.Reserve(cmd.Context(), api.ReservationRequest{Container: args[0], Device: args[1], Replace: true, BlockIOFigures: figures})
		return cli.Answer(e.Env, out, done, err, func(w io.Writer, r api.Reservation) { reservationTable(w, []api.Reservation{r}) })
	})
}

func reservationTable(w io.Writer, list []api.Reservation) {
	if len(list) == 0 {
		fmt.Fprintln(w, "Nothing is reserved.")
		return
	}
	columns.Print(w, list,
		columns.Plain("ID", func(r api.Reservation) string { return r.ID }),
		columns.Text("CONTAINER", func(r api.Reservation) string { return r.Name }).Cut(24),
		columns.Text("DEVICE", func(r api.Reservation) string { return r.Device }),
		columns.Text("RESERVED", func(r api.Reservation) string { return figuresText(r.Reserved) }),
		columns.Text("OF THE DISK", func(r api.Reservation) string {
			return columns.If(r.Share > 0, fmt.Sprintf("%.1f %%", 100*r.Share)) // not of a disk without measured figures
		}),
		columns.Text("ADMISSION", func(r api.Reservation) string { return r.Admission }),
		columns.Text("STATE", func(r api.Reservation) string { return r.State }),
		columns.Text("FROM", func(r api.Reservation) string { return r.From }),
	)
	admissions(w, list)
}
