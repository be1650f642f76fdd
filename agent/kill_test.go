package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
)

const killBoxes = 40

// childAgent is an agent with containers that come and go as fast as they can, until it is killed.
// dirs are those of its state and its host.
func childAgent(dirs string) {
	state, dir, _ := strings.Cut(dirs, " ")
	h := &host{dir: dir}
	j, err := journal.Open(state, filepath.Join(state, "copy"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	set := newFakeSet(true)
	a := assemble(Config{StateDir: state, Log: quiet()}, set, policy.NewStore("", time.Now), j, h.opener,
		[]feature.Feature{turner{newFake(), h, j}}, ordinary())
	go a.Run(context.Background())
	fmt.Println("ready")
	for {
		var list []container.Container
		for id := container.ID(1); id <= killBoxes; id++ {
			switch rand.IntN(3) {
			case 0:
				list = append(list, box(id, policy.NetCPUIsolate))
			case 1:
				list = append(list, box(id, policy.NetCPUObserve))
			}
		}
		set.set(true, list...)
		time.Sleep(time.Millisecond)
	}
}

// killed runs a childAgent and kills it at some moment.
func killed(t *testing.T, r *rig) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=agent "+r.state+" "+r.host.dir)
	out, err := cmd.StdoutPipe()
	testkit.Must(t, err)
	testkit.Must(t, cmd.Start())
	word := make([]byte, 5)
	_, err = out.Read(word)
	if err != nil || string(word) != "ready" {
		t.Errorf("the agent said %q, %v", word, err)
	}
	r.until("something is in force", func() bool {
		files, err := os.ReadDir(r.host.dir)
		testkit.Must(t, err)
		for _, f := range files {
			if data, err := os.ReadFile(filepath.Join(r.host.dir, f.Name())); err == nil && string(data) == "isolated" {
				return true
			}
		}
		return false
	})
	time.Sleep(rand.N(30 * time.Millisecond))
	cmd.Process.Kill()
	cmd.Wait()
}

func killRig(t *testing.T) *rig {
	var ids []container.ID
	for id := container.ID(1); id <= killBoxes; id++ {
		ids = append(ids, id)
	}
	return newRig(t, ids...)
}

// After a kill at any point, a new agent brings the host to what is wanted now, and leaves nothing
// when it stops.
func TestKillAndRestart(t *testing.T) {
	for range testkit.Scale(t, 3, 10) {
		r := killRig(t)
		killed(t, r)
		r.set.set(true, box(1, "isolate"), box(2, "isolate"), box(3, "observe"))
		r.start()
		for id := container.ID(1); id <= killBoxes; id++ {
			want := "plain"
			if id <= 2 {
				want = "isolated"
			}
			r.untilValue(id, want)
		}
		testkit.Must(t, r.stop())
		r.allPlain()
	}
}

var damage = []func(file string) error{
	func(string) error { return nil },
	os.Remove,
	func(file string) error { return os.Truncate(file, 0) },
	func(file string) error {
		st, err := os.Stat(file)
		if err == nil {
			err = os.Truncate(file, st.Size()/2)
		}
		return err
	},
}

// After a kill at any point, the journal alone brings everything back, or its copy if the journal was
// damaged.
func TestKillAndRestore(t *testing.T) {
	changed := 0
	for i := range testkit.Scale(t, 4, 12) {
		r := killRig(t)
		killed(t, r)
		files, err := filepath.Glob(filepath.Join(r.state, "journal-*"))
		testkit.Must(t, err)
		for _, name := range files {
			testkit.Must(t, damage[i%len(damage)](name))
		}
		j, err := journal.Open(r.state, filepath.Join(r.state, "copy"))
		if errors.Is(err, journal.ErrCorrupt) {
			j, err = journal.Open(r.state, filepath.Join(r.state, "copy"))
		}
		testkit.Must(t, err)
		out, err := j.Restore(r.host.open, nil)
		if err != nil {
			t.Error(err)
		}
		changed += len(out)
		testkit.Check(t, j.Close())
		r.allPlain()
	}
	if changed == 0 {
		t.Error("no agent was killed while anything was in force")
	}
}

func (r *rig) allPlain() {
	r.t.Helper()
	files, err := os.ReadDir(r.host.dir)
	if err != nil || len(files) != killBoxes {
		r.t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		if data, err := os.ReadFile(filepath.Join(r.host.dir, f.Name())); err != nil || string(data) != "plain" {
			r.t.Errorf("%s is %q, %v", f.Name(), data, err)
		}
	}
}
