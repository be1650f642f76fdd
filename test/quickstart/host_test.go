package quickstart

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// host is a machine as the guide expects it: an engine at its usual address, and a clone of the
// repository. Its /run, where the sockets are, and its network are separate from this machine's.
type host struct {
	*testkit.Docker
	clone string // its files
	top   string // where it is in the engine's mount namespace
	agent *api.Client
	root  string // where files of its mount namespace can be opened from here
}

func newHost(t *testing.T) *host {
	d := testkit.StartDocker(t)
	dir, err := os.MkdirTemp("/tmp", "flquick-")
	must(t, err)
	t.Cleanup(func() {
		testkit.Check(t, os.RemoveAll(dir))
	})
	// Only the files that would be committed: no built file may be needed.
	copied := exec.Command("sh", "-c", `git ls-files -coz --exclude-standard | xargs -0 cp --parents -t "$0"`, dir)
	copied.Dir = "../.."
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("copy the repository: %v: %s", err, out)
	}
	// It has the repository's path there, so go can use its build cache for it, too.
	top, err := filepath.Abs("../..")
	must(t, err)
	bind := exec.Command("nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", d.PID()), "mount", "--bind", dir, top)
	if out, err := bind.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	h := &host{Docker: d, clone: dir, top: top, root: fmt.Sprintf("/proc/%d/root", d.PID())}
	must(t, os.Symlink(d.Socket, h.root+"/run/docker.sock"))
	h.agent = api.Dial(h.root + "/run/fairlead/fairlead.sock")
	t.Cleanup(h.agent.Close)
	return h
}

// shell starts a shell there. The shell, and with it the agent, ends with the test.
func (h *host) shell(t *testing.T) *shell {
	cmd := exec.Command("nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", h.PID()), fmt.Sprintf("--net=/proc/%d/ns/net", h.PID()),
		"--wdns="+h.top, "bash", "-o", "pipefail")
	cmd.Env = append(os.Environ(), "DOCKER_HOST=", "DOCKER_CONTEXT=", "DOCKER_CONFIG="+h.clone)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(h.clone, "agent.log"))
			t.Logf("log of the agent:\n%s", log)
		}
		in.Close()
		cmd.Wait() // a step that failed has been reported
	})
	return &shell{in: in, out: bufio.NewReader(out)}
}

// await waits until the agent, if one runs, has applied policy to all containers, and the server in
// each of them listens.
func (h *host) await(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(h.clone, "agent.log")); err != nil {
		return // it has not been started
	}
	deadline := time.Now().Add(patience)
	for {
		err := h.settled(t)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (h *host) settled(t *testing.T) error {
	st, err := h.agent.Status(t.Context())
	if err != nil {
		return err
	}
	if !st.Complete {
		return fmt.Errorf("the agent does not know all containers: %+v", st)
	}
	list, err := h.agent.Containers(t.Context())
	if err != nil {
		return err
	}
	for id := range strings.FieldsSeq(h.Must(t, "ps", "-q", "--no-trunc")) {
		i := slices.IndexFunc(list, func(c api.Container) bool { return c.RuntimeID == id })
		if i < 0 {
			return fmt.Errorf("the agent does not know container %s", id)
		}
		for _, f := range list[i].Features {
			if f.State == api.StatePending || f.State == api.StateError {
				return fmt.Errorf("%s: %s is %s: %s", list[i].Name, f.Feature, f.State, f.Error)
			}
		}
		if !listens(list[i].PID) {
			return fmt.Errorf("nobody listens in %s", list[i].Name)
		}
	}
	return nil
}

// listens reports whether a process of that network namespace listens on the port of iperf3, 5201.
func listens(pid int) bool {
	sockets, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp6", pid))
	only4, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", pid))
	for line := range strings.Lines(string(sockets) + string(only4)) {
		if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1], ":1451") && f[3] == "0A" {
			return true
		}
	}
	return false
}
