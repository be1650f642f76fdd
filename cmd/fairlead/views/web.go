package views

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/containers"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/view"
	"github.com/fairlead-project/fairlead/view/web"
)

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
		c := api.Dial(from.Agent.Cfg.Socket)
		defer c.Close()
		o := web.Options{Now: time.Now, Text: containers.View}
		var err error
		if o.Source, o.Title, err = from.Source(c); err != nil {
			return err
		}
		if _, live := o.Source.(view.Live); live {
			if _, err := c.Version(cmd.Context()); err != nil { // an agent that is not there is an error, not an empty page
				return err
			}
			o.Explain = func(ctx context.Context, id api.ID) (api.Explanation, error) { return c.Explain(ctx, api.Ref(id)) }
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
