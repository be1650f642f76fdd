package views

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/fairlead/verb"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/record"
)

func recordVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:        "record",
		SuggestFor: []string{"recording", "history"},
		Short:      "Show what is recorded, or export a part of it",
		Long: `Show what is recorded: the agent keeps all its reports, every five seconds, in
the directory --record-dir, up to --record-size and --record-age of the agent.
"fairlead report" and "fairlead top --at" look at it. "record export" copies a
part of it into a file. Deleting the directory deletes the recording.`,
		Args: cli.NArgs(0, 0, ""),
	}
	out := cli.FormatFlag(cmd)
	verb.Recorded(e, cmd, func(cmd *cobra.Command, from verb.Recording, _ []string) error {
		r, err := from.Open()
		if err != nil {
			return err
		}
		s, err := r.Stat()
		if err != nil {
			return err
		}
		v := recordStatus{Stat: s}
		if from.Replay == "" {
			c := api.Dial(from.Agent.Cfg.Socket)
			defer c.Close()
			if st, err := c.Status(cmd.Context()); err == nil {
				v.Agent = st.Recording
				v.seconds = time.Since(st.Started).Seconds()
			}
		}
		return out.Print(e.Stdout, v, func(w io.Writer) { recordText(w, v) })
	})
	cmd.AddCommand(exportVerb(e))
	return cmd
}

// recordStatus is what fairlead record prints.
type recordStatus struct {
	record.Stat
	Agent *api.Recording `json:"agent,omitempty"` // absent if none answers, or it records nothing

	seconds float64 // since the agent started
}

func recordText(w io.Writer, v recordStatus) {
	if v.Frames == 0 {
		fmt.Fprintln(w, "nothing is recorded yet")
	} else {
		fmt.Fprintf(w, "from     %s\nto       %s\nframes   %d, %.1f kB each\nsize     %.1f MB in %d files\n",
			v.First.Local().Format(time.DateTime), v.Last.Local().Format(time.DateTime), v.Frames, float64(v.Bytes)/float64(v.Frames)/1e3, float64(v.Bytes)/1e6, v.Files)
	}
	if v.Damaged > 0 {
		fmt.Fprintf(w, "damaged  %d files in part\n", v.Damaged)
	}
	switch a := v.Agent; {
	case a == nil:
	case a.Error != "":
		fmt.Fprintf(w, "agent    records nothing now: %s\n", cli.OneLine(a.Error))
	case a.Frames > 0 && v.seconds > 0:
		fmt.Fprintf(w, "cost     %.1f ms of CPU time for each frame, %.3f %% of a CPU\n", a.CPU*1e3/float64(a.Frames), 100*a.CPU/v.seconds)
	}
}

func exportVerb(e verb.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export FILE",
		Short: "Copy a part of the recording into one file",
		Long: `Copy a part of the recording into one new file, which --replay of other verbs
reads, on any host. It names every container, with images, labels, addresses and
paths of cgroups. With --anonymous names are replaced ("container-7"), the same
name in the same way, and everything else that is text is left out.`,
		Example: `  fairlead record export --since 1h incident.rec
  fairlead record export --since 1h --at 14:30 --anonymous incident.rec`,
		Args: cli.NArgs(1, 1, "one FILE"),
	}
	since := cmd.Flags().Duration("since", 0, "how long before the end; 0: from the start of the recording")
	at := cmd.Flags().String("at", "", "the end, such as \"10 min ago\" or 14:30; empty: that of the recording")
	hide := cmd.Flags().Bool("anonymous", false, "leave out or replace what says whose host it is")
	return verb.Recorded(e, cmd, func(_ *cobra.Command, from verb.Recording, args []string) error {
		r, err := from.Open()
		if err != nil {
			return err
		}
		c := record.Choice{Anonymous: *hide}
		if c.From, c.To, err = verb.Window(r, *since, *at); err != nil {
			return err
		}
		for _, k := range policy.Schema() {
			c.Words = append(c.Words, "fairlead."+k.Name)
		}
		done, err := export(r, args[0], c)
		if err != nil {
			return err
		}
		fmt.Fprintf(e.Stdout, "%s: %d frames, from %s to %s\n", cli.Show(args[0]), done.Frames, done.First.Local().Format(time.DateTime), done.Last.Local().Format(time.DateTime))
		if done.Damaged > 0 {
			fmt.Fprintf(e.Stdout, "%d parts of the recording are damaged, and are not in it\n", done.Damaged)
		}
		return nil
	})
}

// export writes a file that nobody else may read. It leaves none after an error.
func export(r *record.Reader, path string, c record.Choice) (done record.Exported, err error) {
	out, err := os.OpenFile(filepath.Clean(path), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return done, err
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err != nil {
			os.Remove(path)
		}
	}()
	if done, err = r.Export(out, c); err == nil && done.Frames == 0 {
		err = errors.New("nothing was recorded in that time; `fairlead record` shows from when to when there is something")
	}
	return done, err
}
