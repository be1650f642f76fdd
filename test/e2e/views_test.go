package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/record"
)

// screen is a program on a terminal of 80 columns and 24 lines.
type screen struct {
	t      *testing.T
	socket string
}

func newScreen(t *testing.T, args ...string) *screen {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		testkit.Skip(t, "no tmux")
	}
	s := &screen{t, filepath.Join(t.TempDir(), "tmux")}
	var line strings.Builder
	for _, a := range append([]string{program}, args...) {
		fmt.Fprintf(&line, " '%s'", a)
	}
	s.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "-e", "LC_ALL=C.UTF-8", line.String()+"; read -r end")
	// The server is a daemon. It ends with this process, also if that is killed.
	end := exec.Command("sh", "-c", `cat; tmux -S "$0" kill-server`, s.socket)
	alive, err := end.StdinPipe()
	must(t, err)
	must(t, end.Start())
	t.Cleanup(func() {
		must(t, alive.Close())
		must(t, end.Wait())
	})
	return s
}

func (s *screen) tmux(args ...string) string {
	s.t.Helper()
	o := runCommand(s.t, exec.Command("tmux", append([]string{"-u", "-S", s.socket}, args...)...))
	if o.status != 0 {
		s.t.Fatalf("tmux %q: %v", args, o)
	}
	return o.out
}

// until waits until all words are on the screen.
func (s *screen) until(words ...string) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("%q on the screen", words), func() error {
		text := s.tmux("capture-pane", "-p")
		for _, w := range words {
			if !strings.Contains(text, w) {
				return fmt.Errorf("there is:\n%s", text)
			}
		}
		return nil
	})
}

// TestViews floods a host without any policy, of which the agent knows only the cgroups of containers.
// Each view names victim and culprit: while it goes on, and ten minutes after.
func TestViews(t *testing.T) {
	r := newRig(t)
	flood := r.add(sandbox.Spec{Name: "e2e-ingest", CPU: onOne})
	victim := r.add(sandbox.Spec{Name: "e2e-db", CPU: onOne})
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	before := r.state()
	a := newAgent(t, r.host)
	a.start()
	names := make(map[string]string)
	await(t, "both containers", func() error {
		list, err := a.api.Containers(t.Context())
		for _, c := range list {
			for _, b := range []string{"e2e-ingest", "e2e-db"} {
				if strings.HasSuffix(c.Name, b) && netcpuOf(c).State == api.StateDone {
					names[b] = c.Name
				}
			}
		}
		if len(names) < 2 {
			return fmt.Errorf("there are %+v (%v)", list, err)
		}
		return nil
	})
	ends := []func(){
		generate(t, flood, 0, "udp-recv"),
		generate(t, victim, 0, "burn"),
		generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.1:9000", "--rate", "50000"),
	}
	slowed := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(names["e2e-db"]) + ` +[0-9]+%`)
	socket := []string{"--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml"), "--record-dir", a.path("lib/record")}
	top := func(args ...string) []string { return append(append([]string{"top"}, args...), socket...) }

	newScreen(t, top()...).until("e2e-db", "e2e-ingest: packets")
	await(t, "ps to name the victim", func() error {
		if o := a.run("ps", "--wide"); !slowed.MatchString(o.out) {
			return fmt.Errorf("%v", o)
		}
		return nil
	})
	await(t, "the recording to have them", func() error {
		return blames(fairlead(t, top("--once", "-o", "json", "--at", time.Now().Format(time.RFC3339))...))
	})
	for _, end := range ends {
		end()
	}
	// Ten minutes later.
	later := filepath.Join(t.TempDir(), "record")
	shift(t, a.path("lib/record"), later, -10*time.Minute)
	past := []string{"--at", "10 min ago", "--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml"), "--record-dir", later}
	must(t, blames(fairlead(t, append([]string{"top", "--once", "-o", "json"}, past...)...)))
	newScreen(t, append([]string{"top"}, past...)...).until("e2e-db", "e2e-ingest: packets")

	mustSay(t, fairlead(t, append([]string{"report", "--since", "10m"}, socket[2:]...)...), 0, "e2e-db", "e2e-ingest")
	for _, verb := range []string{"netcpu", "traffic", "latency", "io", "overlay", "doctor"} {
		if o := a.run(verb); o.status == 2 || strings.Contains(o.err, "panic") {
			t.Errorf("%s: %v", verb, o)
		}
	}
	mustSay(t, a.run("explain", names["e2e-db"]), 0, "Nothing was changed")
	a.page()
	a.stop()
	r.sameAs(before, "after a clean stop")
}

// blames returns an error unless an overview blames the packets of the flood for what slows the
// victim. On a busy machine others may slow it more.
func blames(o output) error {
	var seen api.Overview
	if err := json.Unmarshal([]byte(o.out), &seen); err != nil {
		return fmt.Errorf("%w\n%v", err, o)
	}
	for _, row := range seen.Rows {
		if strings.HasSuffix(row.Name, "e2e-db") && slices.ContainsFunc(row.By, func(x api.Slowdown) bool {
			return x.Cause == api.SlowedByPackets && strings.HasSuffix(x.Name, "e2e-ingest")
		}) {
			return nil
		}
	}
	return fmt.Errorf("nobody is blamed: %v", o)
}

// shift copies a recording into another folder, as if it were made at another time.
func shift(t *testing.T, from, to string, by time.Duration) {
	t.Helper()
	in, err := record.Open(from)
	must(t, err)
	out, err := record.New(record.Config{Dir: to})
	must(t, err)
	n := 0
	for f, err := range in.Frames(time.Time{}, time.Time{}, 0) {
		must(t, err)
		f.Taken = f.Taken.Add(by)
		must(t, out.Write(f))
		n++
	}
	must(t, out.Close())
	if n < 2 {
		t.Fatalf("%d frames are recorded", n)
	}
}

// page opens the first page of fairlead web.
func (a *agent) page() {
	a.t.Helper()
	cmd := exec.Command(program, "web", "--socket", a.path("fairlead.sock"), "--config", a.path("config.yaml"), "--record-dir", a.path("lib/record"))
	link, err := cmd.StdoutPipe()
	must(a.t, err)
	must(a.t, cmd.Start())
	defer func() {
		cmd.Process.Kill()
		cmd.Wait() // it was killed
	}()
	var url string
	_, err = fmt.Fscanln(link, &url)
	must(a.t, err)
	await(a.t, "the page", func() error {
		res, err := http.Get(url)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, res.Status)
		}
		return nil
	})
}
