package blockio

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/columns"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

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
