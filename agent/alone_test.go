package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestAlone(t *testing.T) {
	name := fmt.Sprintf("@fairlead-test-%d", os.Getpid())
	// What the kernel says of this process, which stands for the other agent.
	status := func(caps, user string) (proc string) {
		proc = t.TempDir()
		other, self := filepath.Join(proc, fmt.Sprint(os.Getpid())), filepath.Join(proc, "self")
		net, err := os.ReadFile("/proc/net/unix")
		if err := errors.Join(err, os.MkdirAll(filepath.Join(other, "ns"), 0o700), os.MkdirAll(filepath.Join(self, "ns"), 0o700), os.Mkdir(filepath.Join(proc, "net"), 0o700),
			os.Symlink("user:["+user+"]", filepath.Join(other, "ns/user")), os.Symlink("user:[1]", filepath.Join(self, "ns/user")), os.Symlink("/proc/self/fd", filepath.Join(other, "fd")),
			os.WriteFile(filepath.Join(proc, "net/unix"), net, 0o600), os.WriteFile(filepath.Join(other, "status"), []byte("Name:\tx\nCapEff:\t"+caps+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
		return proc
	}
	const agents, dockers = "000001ffffffffff", "00000000a80425fb"
	first, err := alone(name, "/proc", quiet())
	if err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		if _, err := alone(name, status(agents, "1"), quiet()); !errors.Is(err, ErrTwo) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
			t.Errorf("a second agent: %v", err)
		}
	}
	for what, proc := range map[string]string{"a container": status(dockers, "1"), "root of a user namespace": status(agents, "2")} {
		var log bytes.Buffer
		if _, err := alone(name, proc, slog.New(slog.NewTextHandler(&log, nil))); err != nil || !strings.Contains(log.String(), "is no agent") {
			t.Errorf("with the name taken by %s: %v; the log says %s", what, err, log.String())
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := alone(name, "/proc", quiet())
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

// The process that has taken the name may fill its backlog.
func TestAloneCrowded(t *testing.T) {
	name := fmt.Sprintf("@fairlead-crowd-%d", os.Getpid())
	first, err := alone(name, "/proc", quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	var waiting []net.Conn
	defer func() {
		for _, c := range waiting {
			c.Close()
		}
	}()
	for {
		c, err := net.Dial("unix", name)
		if err != nil {
			break
		}
		waiting = append(waiting, c)
	}
	if l, err := alone(name, "/proc", quiet()); err != nil {
		t.Errorf("with %d waiting: %v", len(waiting), err)
	} else {
		l.Close()
	}
}

// A process takes the name, leaves the socket to another one, and its number is then that of one
// that could be an agent.
func TestAloneLeft(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("the owner's uid has to be 0")
		return
	}
	name := fmt.Sprintf("@fairlead-left-%d", os.Getpid())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: name})
	if err != nil {
		t.Fatal(err)
	}
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	if _, err := alone(name, "/proc", quiet()); !errors.Is(err, ErrTwo) {
		t.Errorf("while the process has it: %v", err)
	}
	if err := errors.Join(f.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	got, err := alone(name, "/proc", quiet())
	if err != nil {
		t.Fatalf("with the socket left to a process that is no agent: %v", err)
	}
	got.Close()
}
