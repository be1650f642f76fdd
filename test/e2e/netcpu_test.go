package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/record"
)

// generate starts a load generator in a box, on one CPU. It runs until end is called or the test
// ends.
func generate(t *testing.T, b *sandbox.Box, cpu int, args ...string) (end func()) {
	t.Helper()
	return begin(t, b, cpu, append([]string{load.Verb}, args...)...)
}

// begin is generate for any of this program's verbs.
func begin(t *testing.T, b *sandbox.Box, cpu int, args ...string) (end func()) {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	cmd := exec.Command(exe, args...)
	cmd.Stderr = os.Stderr
	p, err := b.Start(cmd, cpu)
	must(t, err)
	end = func() { p.Kill(); ends(t, p.PID, p.Done()) }
	t.Cleanup(end)
	return end
}

// keepWriting writes to a file, and waits for its disk each time: the verb writeVerb.
func keepWriting(file string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		if _, err := f.WriteAt(make([]byte, 4096), 0); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		time.Sleep(time.Millisecond) // for file systems without a wait, as in memory
	}
}

// TestBlame floods one container without any policy, and looks for the victim, another container on
// the same CPU. One container waits for its own quota, another for a CPU that it shares, and a
// third for its disk: none of these may count as robbed. Each view names victim and culprit, during
// the flood and ten minutes after.
func TestBlame(t *testing.T) {
	testkit.Later(t)
	disk := t.TempDir() // removed after the writers in it
	r := newRig(t)
	flood := r.add(sandbox.Spec{Name: "e2e-flood"})
	victim := r.add(sandbox.Spec{Name: "e2e-victim"})
	slow := r.add(sandbox.Spec{Name: "e2e-slow", CPU: sandbox.CPU{Quota: 10e6, Period: 100e6}})
	crowded := r.add(sandbox.Spec{Name: "e2e-crowded"})
	waits := r.add(sandbox.Spec{Name: "e2e-waits"})
	must(t, r.host.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "1" }))
	before := r.state()
	a := r.agent()
	a.start()
	for _, b := range r.boxes {
		a.stands(b.Name, "netcpu", api.StateDone)
	}
	if _, err := a.api.NetCPU(t.Context(), ""); err != nil {
		t.Fatal(err)
	}

	loads := []func(){
		generate(t, flood, 0, "udp-recv"),
		generate(t, victim, 0, "burn"),
		generate(t, slow, 1, "burn"),
		generate(t, crowded, 1, "burn"),
		generate(t, r.wire, 1, "udp-send", "--to", "10.66.1.1:9000", "--rate", "50000"),
	}

	var n api.NetCPU
	read := func() (of map[string]api.NetCPUAccount, err error) {
		o := a.run("netcpu", "--interval", "1s", "-o", "json")
		if o.status != 0 {
			return nil, fmt.Errorf("%v", o)
		}
		n = api.NetCPU{}
		if err := json.Unmarshal([]byte(o.out), &n); err != nil {
			return nil, err
		}
		of = make(map[string]api.NetCPUAccount)
		for _, x := range n.Accounts {
			of[x.Name] = x
		}
		return of, nil
	}
	await(t, "the flood to be blamed", func() error {
		of, err := read()
		if err != nil {
			return err
		}
		f, v, s, c := of["e2e-flood"], of["e2e-victim"], of["e2e-slow"], of["e2e-crowded"]
		switch {
		case f.Receive == 0 || len(f.Work) == 0 || f.Work[0].Protocol != "udp" || f.Work[0].Each == 0 || f.Taken == 0:
			return fmt.Errorf("the flood's account is %+v", f)
		case len(v.StolenBy) == 0 || v.StolenBy[0].Container != f.Container || v.Stolen == 0 || v.Tasks < v.Stolen:
			return fmt.Errorf("the victim's account is %+v", v)
		case v.Network() > f.Network()/10:
			return fmt.Errorf("the victim pays %v, the flood %v", v.Network(), f.Network())
		case s.Throttled == 0 || s.Stolen > spared(s, v):
			return fmt.Errorf("the account of the one that its quota holds back is %+v", s)
		case c.Tasks == 0 || c.Stolen > spared(c, v):
			return fmt.Errorf("the account of the one that shares a CPU is %+v", c)
		}
		for _, x := range n.Matrix {
			if x.Kind == api.VictimTask && x.VictimName == "e2e-victim" {
				if x.CulpritName != "e2e-flood" { // the largest comes first
					return fmt.Errorf("the matrix says that %q robs the victim", x.CulpritName)
				}
				return nil
			}
		}
		return fmt.Errorf("the matrix has no victim: %+v", n.Matrix)
	})

	// Beside computing loads, 6.18 would let the sender wait for minutes.
	loads[2]()
	loads[3]()
	loads = append(loads, begin(t, waits, 1, writeVerb, filepath.Join(disk, "written")))
	await(t, "one that waits for its disk beside the flood", func() error {
		of, err := read()
		if err != nil {
			return err
		}
		v, w := of["e2e-victim"], of["e2e-waits"]
		if v.Stolen == 0 || w.Tasks == 0 || w.Throttled != 0 || w.Stolen > spared(w, v) {
			return fmt.Errorf("its account is %+v, the victim's %+v", w, v)
		}
		return nil
	})

	recording, later := a.path("lib/record"), filepath.Join(t.TempDir(), "record")
	top := func(dir string, args ...string) error {
		return blames(a.run(append([]string{"top", "--once", "-o", "json", "--record-dir", dir}, args...)...))
	}
	await(t, "top to name the culprit", func() error { return top(recording) })
	slowed := regexp.MustCompile(`(?m)^e2e-victim +[0-9]+%`)
	await(t, "ps to name the victim", func() error {
		if o := a.run("ps", "--wide"); !slowed.MatchString(o.out) {
			return fmt.Errorf("%v", o)
		}
		return nil
	})
	await(t, "the recording to have them", func() error { return top(recording, "--at", time.Now().Format(time.RFC3339)) })
	// With no CPU idle, the kernel may take half a minute to close an inotify.
	for _, end := range loads {
		end()
	}
	shift(t, recording, later, -10*time.Minute)
	must(t, top(later, "--at", "10 min ago"))
	mustSay(t, a.run("report", "--since", "10m", "--record-dir", recording), 0, "e2e-victim", "e2e-flood")
	for _, verb := range []string{"netcpu", "traffic", "latency", "io", "overlay", "doctor"} {
		if o := a.run(verb); o.status == 2 || strings.Contains(o.err, "panic") {
			t.Errorf("%s: %v", verb, o)
		}
	}
	mustSay(t, a.run("explain", "e2e-victim"), 0, "Nothing was changed")
	a.stop()
	r.sameAs(before, "after a clean stop")
}

// blames returns an error unless an overview blames the flood's packets for the victim's slowdown.
// On a busy machine others may slow it more.
func blames(o output) error {
	var seen api.Overview
	if err := json.Unmarshal([]byte(o.out), &seen); err != nil {
		return fmt.Errorf("%w\n%v", err, o)
	}
	for _, row := range seen.Rows {
		if row.Name == "e2e-victim" && slices.ContainsFunc(row.By, func(x api.Slowdown) bool {
			return x.Cause == api.SlowedByPackets && x.Name == "e2e-flood"
		}) {
			return nil
		}
	}
	return fmt.Errorf("nobody is blamed: %v", o)
}

// shift copies a recording into another folder, with its times shifted.
func shift(t *testing.T, from, to string, by time.Duration) {
	t.Helper()
	in, err := record.Open(from)
	must(t, err)
	out, err := record.New(record.Config{Dir: to})
	must(t, err)
	n := 0
	for f, err := range in.Frames(t.Context(), time.Time{}, time.Time{}, 0) {
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

// spared is how much time a container may lose that the flood does not rob: a smaller fraction of
// its tasks' time than the victim lost at the same time.
func spared(a, victim api.NetCPUAccount) float64 { return a.Tasks * victim.Stolen / victim.Tasks }

// selfOf asks from inside a container.
func (a *agent) selfOf(b *sandbox.Box) (self api.Self) {
	a.t.Helper()
	t := a.t
	exe, err := os.Executable()
	must(t, err)
	cmd := exec.Command(exe, askSelfVerb, a.path("self.sock"))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	p, err := b.Start(cmd)
	must(t, err)
	if err := p.Wait(); err != nil {
		t.Fatalf("ask from inside %s: %v\n%s", b.Name, err, &out)
	}
	must(t, json.Unmarshal(out.Bytes(), &self))
	return self
}
