// Package views has the verbs that show the host over time: top and web, live or from the recording,
// record and report. It draws nothing but tables; view/tui and view/web do. Main lists its verbs.
package views

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/containers"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
	"github.com/fairlead-project/fairlead/view/tui"
	"github.com/fairlead-project/fairlead/view/web"
)

// Verbs are the verbs of this package.
func Verbs() []verb.Verb {
	return []verb.Verb{topVerb, recordVerb, reportVerb, webVerb}
}

// topFlags are the flags of the verb top.
type topFlags struct {
	out      *cli.Format
	interval time.Duration
	at       string
	once     bool
	order    view.Order
}

func topVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "top",
		SuggestFor: []string{"htop", "watch", "live", "monitor"},
		Short:      "Show live who is slowed by whom, and what is done about it",
		Long: `Show in a table that refreshes itself which containers are slowed by their
neighbours, by whom and by what, the most slowed first. Enter opens one container:
its last ten minutes, blame, policy, and what was changed on the host for it. The
key ? lists the others.

` + topColumns() + `

--at shows a moment of the past that the agent has recorded, and --replay a file of
` + "`fairlead record export`" + `; keys move in time from there.

Where the output is no terminal, or with --once or -o, the table is printed once.`,
		Example: `  fairlead top
  fairlead top --at '10 min ago'
  fairlead top --replay incident.frames --at 14:05
  fairlead top --once --sort cpu | head`,
		Args: cli.NArgs(0, 0, ""),
	}
	var f topFlags
	f.out = cli.FormatFlag(cmd)
	cmd.Flags().DurationVar(&f.interval, "interval", view.Every, "time between two readings")
	cmd.Flags().StringVar(&f.at, "at", "", "show this moment of the past: \"10 min ago\", 14:05, \"2026-11-26 14:05\", or RFC 3339")
	cmd.Flags().BoolVar(&f.once, "once", false, "print the table once, and exit")
	cmd.Flags().StringVar(&f.order.Sort, "sort", view.BySlowed, "sort by this column: "+strings.Join(columnKeys(), ", "))
	cmd.Flags().BoolVar(&f.order.Reverse, "reverse", false, "sort the other way round")
	cmd.Flags().StringVar(&f.order.Filter, "filter", "", "show only containers with this text in their name or pod, or in who slows them")
	cmd.Flags().BoolVar(&f.order.Tree, "tree", false, "show containers below their pods")
	return verb.Recorded(e, cmd, func(cmd *cobra.Command, from verb.Recording, _ []string) error {
		switch {
		case f.interval < verb.MinInterval || f.interval > verb.MaxInterval:
			return cli.Usagef("--interval %v: must be %v to %v", f.interval, verb.MinInterval, verb.MaxInterval)
		case !slices.Contains(columnKeys(), f.order.Sort):
			return cli.Usagef("--sort %q: must be one of %s", f.order.Sort, strings.Join(columnKeys(), ", "))
		}
		var at time.Time
		if f.at != "" {
			var err error
			if at, err = view.When(f.at, time.Now()); err != nil {
				return cli.Usagef("--at: %w", err)
			}
		}
		source, title, err := from.Source()
		if err != nil {
			return err
		}
		once := f.once || f.out.Name != "table" || !cli.Terminal(e.Stdout)
		if !once && e.Getenv("TERM") != "dumb" {
			return topScreen(cmd.Context(), e, from.Client, source, title, at, f)
		}
		// A dumb terminal cannot move its cursor: it gets one table after the other.
		_, live := source.(view.Live)
		for {
			o, err := topOverview(cmd.Context(), source, at, f.interval)
			if err == nil {
				err = f.out.Print(e.Stdout, o, func(w io.Writer) { topTable(w, o, f.order) })
			}
			if err != nil || once || !at.IsZero() || !live {
				return err
			}
			fmt.Fprintln(e.Stdout)
		}
	})
}

// topColumns is the part of the help about the columns.
func topColumns() string {
	var out strings.Builder
	for _, c := range view.Columns() {
		head := c.Head
		for _, line := range cli.Fold(c.Help, 70) {
			fmt.Fprintf(&out, "  %-10s  %s\n", head, line)
			head = ""
		}
	}
	return strings.TrimRight(out.String(), "\n")
}

func columnKeys() []string {
	var keys []string
	for _, c := range view.Columns() {
		keys = append(keys, c.Key)
	}
	return keys
}

// topOverview returns the overview of a moment; zero: now, measured over an interval, or the newest
// of a recording.
func topOverview(ctx context.Context, s view.Source, at time.Time, interval time.Duration) (api.Overview, error) {
	var h view.History
	agent, live := s.(view.Live)
	if !live || !at.IsZero() {
		first, last := s.Span()
		if last.IsZero() {
			return api.Overview{}, errors.New("nothing is recorded, or the recording cannot be read; members of the group " + api.Group + " may read that of the agent")
		}
		if at.IsZero() {
			at = last
		}
		past, err := view.Load(ctx, s, at.Add(-time.Minute), at)
		if o, ok := past.At(at); ok {
			return o, nil
		} else if err != nil {
			return o, err
		}
		return api.Overview{}, fmt.Errorf("nothing is recorded of %s; the recording goes from %s to %s", at.Local().Format(time.DateTime), first.Local().Format(time.DateTime), last.Local().Format(time.DateTime))
	}
	for {
		f, err := agent.Next(ctx)
		if err != nil {
			return api.Overview{}, err
		}
		if o, ok := h.Add(f); ok {
			return o, nil
		}
		if err := verb.Wait(ctx, interval); err != nil {
			return api.Overview{}, err
		}
	}
}

// topTable prints an overview.
func topTable(w io.Writer, o api.Overview, order view.Order) {
	var table []columns.Column[view.Row]
	for _, c := range view.Columns() {
		of := columns.Number(c.Head, c.Cell)
		if c.Text {
			of = columns.Plain(c.Head, c.Cell)
		}
		switch c.Key {
		case view.ByName, view.ByWhom:
			of = of.Cut(24)
		case "force":
			of = of.Cut(40)
		}
		table = append(table, of)
	}
	columns.Print(w, view.Rows(o, order), table...)
}

// topScreen shows the view on the terminal.
func topScreen(ctx context.Context, e verb.Env, c *api.Client, s view.Source, title string, at time.Time, f topFlags) error {
	o := tui.Options{
		Source: s, Title: title, Every: f.interval, At: at, Order: f.order,
		Text: containers.View,
		In:   e.Stdin, Out: e.Stdout, Environ: os.Environ(), Now: time.Now,
		Plain: e.Getenv("NO_COLOR") != "",
		ASCII: asciiTerminal(e.Getenv),
	}
	if agent, live := s.(view.Live); live {
		first, err := agent.Next(ctx) // an agent that is not there is an error, not an empty screen
		if err != nil {
			return err
		}
		o.First = []api.Frame{first}
		o.Explain = func(ctx context.Context, id api.ID) (api.Explanation, error) { return c.Explain(ctx, api.Ref(id)) }
	}
	return tui.Run(ctx, o)
}

// asciiTerminal reports whether a terminal shows nothing but ASCII: an old one, or one of another
// character set. Where the locale is not set, as in many containers and over ssh, UTF-8 is likely.
func asciiTerminal(getenv func(string) string) bool {
	if term := getenv("TERM"); term == "linux" || strings.HasPrefix(term, "vt") {
		return true
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToLower(getenv(name)); v != "" {
			return !strings.Contains(v, "utf-8") && !strings.Contains(v, "utf8")
		}
	}
	return false
}

func webVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "web",
		SuggestFor: []string{"ui", "gui", "browser", "dashboard", "page", "http"},
		Short:      "Show in a browser who is slowed by whom, now and before",
		Long: `Serve pages to the browsers of this host, and print the link to open: the containers,
the most slowed first; who slows whom; and each container, with its last minutes or
the time that was recorded. The pages change nothing, and need no network.

The link opens once: that browser sees the pages as long as the verb runs. From another machine,
forward the port first: ssh -L PORT:127.0.0.1:PORT HOST`,
		Example: `  fairlead web
  fairlead web --port 8080
  fairlead web --replay incident.frames`,
		Args: cli.NArgs(0, 0, ""),
	}
	port := cmd.Flags().Uint16("port", 0, "port of 127.0.0.1 to serve on; 0: a free one")
	return verb.Recorded(e, cmd, func(cmd *cobra.Command, from verb.Recording, _ []string) error {
		o := web.Options{Now: time.Now, Text: containers.View}
		var err error
		if o.Source, o.Title, err = from.Source(); err != nil {
			return err
		}
		if _, live := o.Source.(view.Live); live {
			if _, err := from.Client.Version(cmd.Context()); err != nil { // an agent that is not there is an error, not an empty page
				return err
			}
			o.Explain = func(ctx context.Context, id api.ID) (api.Explanation, error) {
				return from.Client.Explain(ctx, api.Ref(id))
			}
		}
		s := web.New(o)
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(*port))))
		if err != nil {
			return err
		}
		fmt.Fprintln(e.Stdout, s.Link(l.Addr()))
		return s.Serve(cmd.Context(), l)
	})
}
