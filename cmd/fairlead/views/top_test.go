package views

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
	"github.com/fairlead-project/fairlead/cmd/internal/verbtest"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/record"
	"github.com/fairlead-project/fairlead/test/viewtest"
)

// busy is an agent of a host that does not exist. Each frame is the next of the host's.
type busy struct {
	verbtest.Stub
	host viewtest.Host
	next *atomic.Int64
}

func newBusy() busy {
	h := viewtest.Host{Containers: 60, Every: 200 * time.Millisecond}
	h.Begin = time.Now().Add(-time.Minute)
	return busy{Stub: verbtest.Example(), host: h, next: new(atomic.Int64)}
}

func (b busy) Frame(context.Context) (api.Frame, error) {
	return b.host.Frame(int(b.next.Add(1))), nil
}

func (b busy) Explain(_ context.Context, ref string) (api.Explanation, error) {
	for _, c := range b.host.Frame(1).Containers {
		if api.Ref(c.ID) == ref {
			x := b.Stub.Explained
			x.Container = c
			return x, nil
		}
	}
	return api.Explanation{}, fmt.Errorf("no container %q", ref)
}

// recordedHost writes frames of a host into a recording.
func recordedHost(t *testing.T, h viewtest.Host, frames int) string {
	t.Helper()
	dir := t.TempDir()
	w, err := record.New(record.Config{Dir: dir})
	must(t, err)
	for i := range frames {
		must(t, w.Write(h.Frame(i)))
	}
	must(t, w.Close())
	return dir
}

// Where there is no terminal, or with -o, the verb prints one table.
func TestTopOnce(t *testing.T) {
	status, out, errs := verbtest.Against(t, run, newBusy(), "top", "--interval", "100ms")
	if status != cli.Done || errs != "" {
		t.Fatal(status, errs)
	}
	lines := strings.Split(out, "\n")
	if len(lines) != 62 || !strings.HasPrefix(lines[0], "CONTAINER  ") || !strings.HasPrefix(lines[1], "db-1 ") || !strings.Contains(lines[1], "18 %  flood: packets") {
		t.Errorf("printed:\n%s", out)
	}
	clean(t, out)
	status, out, errs = verbtest.Against(t, run, newBusy(), "top", "--interval", "100ms", "-o", "json", "--filter", "flood")
	if status != cli.Done || !strings.Contains(out, `"cause": "packets"`) {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
	clean(t, out)
}

// A host without policy, runtime or features has a table, too.
func TestTopBare(t *testing.T) {
	b := bare{Stub: verbtest.Example(), n: new(atomic.Int64)}
	status, out, errs := verbtest.Against(t, run, b, "top", "--interval", "100ms")
	if status != cli.Done || errs != "" || !strings.Contains(out, "a.service") {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
}

type bare struct {
	verbtest.Stub
	n *atomic.Int64
}

func (b bare) Frame(context.Context) (api.Frame, error) {
	return api.Frame{Taken: viewtest.Start.Add(time.Duration(b.n.Add(1)) * time.Second), Containers: []api.Container{{ID: 7, Name: "a.service", Source: "cgroup"}}}, nil
}

// The past comes from the recording of the agent, or from a file, without an agent.
func TestTopPast(t *testing.T) {
	h := viewtest.Host{Containers: 8, Every: 5 * time.Second, Calm: 60}
	h.Begin = time.Now().Add(-10 * time.Minute)
	dir := recordedHost(t, h, 121)
	none := filepath.Join(t.TempDir(), "s")
	for _, tt := range []struct {
		args []string
		want string // in the line of the victim
	}{
		{[]string{"--record-dir", dir, "--at", "8 min ago"}, " -  -  "},
		{[]string{"--record-dir", dir, "--at", "2 min ago"}, "flood: packets"},
		{[]string{"--replay", dir}, "flood: packets"},
		{[]string{"--replay", dir, "--at", "8 min ago"}, " -  -  "},
	} {
		status, out, errs := verbtest.Alone(t, run, append([]string{"top", "--socket", none}, tt.args...)...)
		_, victim, _ := strings.Cut(out, "\ndb-1 ")
		victim, _, _ = strings.Cut(victim, "\n")
		if status != cli.Done || !strings.Contains(victim, tt.want) {
			t.Errorf("%q: status %d: %s%s", tt.args, status, out, errs)
		}
		clean(t, out)
	}
	for _, args := range [][]string{{"--replay", none}, {"--record-dir", none, "--at", "1 min ago"}, {"--record-dir", dir, "--at", "1 h ago"}} {
		if status, _, errs := verbtest.Alone(t, run, append([]string{"top", "--socket", none}, args...)...); status != cli.Failed || verbtest.GoWords.MatchString(errs) {
			t.Errorf("%q: status %d: %s", args, status, errs)
		}
	}
}

// tmux is a terminal of its own in which the program runs.
type tmux struct {
	t      *testing.T
	socket string
}

// newTmux starts a shell in a terminal. env is set in it.
func newTmux(t *testing.T, columns, rows int, env ...string) tmux {
	if _, err := exec.LookPath("tmux"); err != nil {
		testkit.Skip(t, "no tmux")
	}
	m := tmux{t, filepath.Join(t.TempDir(), "tmux")}
	args := []string{"-f", "/dev/null", "new-session", "-d", "-x", fmt.Sprint(columns), "-y", fmt.Sprint(rows)}
	for _, e := range append(env, "LC_ALL=C.UTF-8", "PATH="+os.Getenv("PATH")) {
		args = append(args, "-e", e)
	}
	m.run(append(args, "sh")...)
	// The server is a daemon. It ends with this process, also if that is killed.
	end := exec.Command("sh", "-c", `cat; tmux -S "$0" kill-server`, m.socket)
	alive, err := end.StdinPipe()
	if err == nil {
		err = end.Start()
	}
	if err != nil {
		m.run("kill-server")
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testkit.Check(t, errors.Join(alive.Close(), end.Wait()))
	})
	m.text("PS1='rea''dy> '\n") // dash ignores that of the environment
	m.until("the shell is ready", "ready>")
	return m
}

func (m tmux) run(args ...string) string {
	m.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-u", "-S", m.socket}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("tmux %q: %v: %s", args, err, out)
	}
	return string(out)
}

// keys presses keys, as tmux names them; text types a text.
func (m tmux) keys(keys ...string) { m.run(append([]string{"send-keys", "--"}, keys...)...) }
func (m tmux) text(text string)    { m.run("send-keys", "-l", "--", text) }

func (m tmux) screen() string { return m.run("capture-pane", "-p") }

// until waits until all parts are on the screen.
func (m tmux) until(what string, parts ...string) (screen string) {
	m.t.Helper()
	m.when(fmt.Sprintf("%s (%q)", what, parts), func(s string) bool {
		screen = s
		return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(s, p) })
	})
	return screen
}

func (m tmux) when(what string, ok func(screen string) bool) {
	m.t.Helper()
	testkit.AwaitNone(m.t, func() string {
		s := m.screen()
		if ok(s) {
			return ""
		}
		return fmt.Sprintf("waited in vain until %s:\n%s", what, s)
	})
}

// first is the name in the first row of the table.
func first(screen string) string {
	lines := strings.Split(screen, "\n")
	if len(lines) < 4 {
		return ""
	}
	name, _, _ := strings.Cut(lines[3], " ")
	return name
}

// The program takes a terminal, follows its keys and its size, says that its agent went, and leaves the
// terminal as it was. What each key does is tested in view/tui.
func TestTopOnTerminal(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	stop := verbtest.Serve(t, socket, newBusy())
	m := newTmux(t, 80, 24)
	m.text("fairlead top --interval 200ms --record-dir= --config= --socket " + socket + "; echo left $?; stty -a | grep -o ' icanon'\n")
	s := m.until("victim and culprit appear", "db-1", "flood: packets", "1 of 60 containers slowed", "q quit")
	testkit.Same(t, "the victim is not the first:\n"+s, "db-1", first(s))
	m.keys("Enter")
	m.until("the victim is open", "db-1  slowed 18 % by flood", "10 minutes", "Who slows it")
	m.keys("End")
	m.until("what was changed for it", "What netcpu changed on the host for it")
	m.run("resize-window", "-x", "100", "-y", "30")
	m.when("the screen has the new size", func(s string) bool {
		lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
		return len(lines) == 30 && strings.Contains(lines[29], "q quit")
	})
	m.keys("Escape")
	stop()
	m.until("the loss of the agent is shown", "NO ANSWER", "no agent answers")
	m.keys("q")
	s = m.until("the terminal is as before", "left 0", " icanon", "ready>")
	if strings.Contains(s, "SLOWED") {
		t.Errorf("the table is still there:\n%s", s)
	}
	if flags := m.run("display-message", "-p", "#{alternate_on}#{mouse_any_flag}#{cursor_flag}"); flags != "001\n" {
		t.Errorf("alternate screen, mouse and cursor: %s", flags)
	}
}

// Old terminals, and those without colours, show the same without what they do not know.
func TestTopOnOldTerminals(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	stop := verbtest.Serve(t, socket, newBusy())
	defer stop()
	start := "fairlead top --interval 200ms --record-dir= --config= --socket " + socket + "\n"
	for env, plain := range map[string]bool{"TERM=vt100": true, "NO_COLOR=1": true, "TERM=xterm-256color": false} {
		t.Run(env, func(t *testing.T) {
			m := newTmux(t, 80, 24, env)
			command := start
			if strings.HasPrefix(env, "TERM=") {
				command = env + " " + start // tmux sets its own
			}
			m.text(command)
			m.until("victim and culprit appear", "db-1", "flood: packets", "quit")
			m.keys("Enter")
			s := m.until("the victim is open", "Who slows it", "10 minutes")
			styled := m.run("capture-pane", "-p", "-e")
			if coloured := strings.Contains(styled, "\x1b[33m") || strings.Contains(styled, "\x1b[36m"); coloured == plain {
				t.Errorf("colours: %v:\n%q", coloured, styled)
			}
			if ascii := !strings.ContainsFunc(s, func(r rune) bool { return r > 0x7f }); ascii != (env == "TERM=vt100") {
				t.Errorf("ASCII alone: %v:\n%s", ascii, s)
			}
			m.keys("q")
			m.until("it has ended", "ready>")
		})
	}
	m := newTmux(t, 120, 40)
	m.text("TERM=dumb " + strings.Replace(start, "top", "top --filter db-1", 1)) // two tables fit on the screen
	m.when("two tables are printed", func(s string) bool { return strings.Count(s, "CONTAINER ") > 1 })
	m.keys("C-c")
	m.until("it has ended", "ready>")
}

// clean fails the test if an output has what could control a terminal.
func clean(t *testing.T, out string) {
	t.Helper()
	if i := strings.IndexFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("%q is in the output", out[i:min(len(out), i+20)])
	}
}
