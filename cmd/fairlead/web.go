package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/record"
	"github.com/fairlead-project/fairlead/view"
	"github.com/fairlead-project/fairlead/view/web"
)

// recording is where an agent records frames.
const recording = "/var/lib/fairlead/record"

func webVerb(e cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "web",
		SuggestFor: []string{"ui", "gui", "browser", "dashboard", "page", "http"},
		Short:      "Show in a browser who is slowed by whom, now and before",
		Long: `Serve pages to the browsers of this host, and print the link to open: the containers,
the most slowed first; who slows whom; and each container, with its last minutes or
the time that was recorded. The pages change nothing, and need no network.

Only who has the link sees the pages, as long as the verb runs. From another machine,
forward the port first: ssh -L PORT:127.0.0.1:PORT HOST`,
		Example: `  fairlead web
  fairlead web --port 8080
  fairlead web --replay incident.frames`,
		Args: cli.NArgs(0, 0, ""),
	}
	port := cmd.Flags().Uint16("port", 0, "port of 127.0.0.1 to serve on; 0: a free one")
	replay := cmd.Flags().String("replay", "", "show a recording, not the agent")
	return dialed(e, cmd, func(cmd *cobra.Command, c *api.Client, _ []string) error {
		o := web.Options{Now: time.Now}
		if *replay != "" {
			r, err := record.Open(*replay)
			if err != nil {
				return err
			}
			o.Source, o.Title = &view.Recorded{Recording: r}, filepath.Base(*replay)
		} else {
			if _, err := c.Version(cmd.Context()); err != nil { // an agent that is not there is an error, not an empty page
				return err
			}
			host, err := os.Hostname()
			if err != nil {
				return err
			}
			a := &view.Agent{Client: c}
			if r, err := record.Open(recording); err == nil { // else there is no past to be shown
				a.Past = r
			}
			o.Source, o.Title = a, host
			o.Explain = func(ctx context.Context, id api.ID) (api.Explanation, error) { return c.Explain(ctx, api.Ref(id)) }
			o.Text = func(x api.Explanation, _ bool, now time.Time) string {
				var out strings.Builder
				explain(&out, x, false, now)
				return out.String()
			}
		}
		s, err := web.New(o)
		if err != nil {
			return err
		}
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(*port))))
		if err != nil {
			return err
		}
		fmt.Fprintln(e.Stdout, s.Link(l.Addr()))
		return s.Serve(cmd.Context(), l)
	})
}
