package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAlone(t *testing.T) {
	name := fmt.Sprintf("@fairlead-test-%d", os.Getpid())
	// What the kernel says of this process, which stands for the other agent.
	status := func(caps string) (proc string) {
		proc = t.TempDir()
		dir := filepath.Join(proc, fmt.Sprint(os.Getpid()))
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "status"), []byte("Name:\tx\nCapEff:\t"+caps+"\n"), 0o600)); err != nil {
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
		if _, err := alone(name, status(agents), quiet()); !errors.Is(err, ErrTwo) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
			t.Errorf("a second agent: %v", err)
		}
	}
	var log bytes.Buffer
	if _, err := alone(name, status(dockers), slog.New(slog.NewTextHandler(&log, nil))); err != nil || !strings.Contains(log.String(), "is no agent") {
		t.Errorf("with the name taken by a container: %v; the log says %s", err, log.String())
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

// Whoever has taken the name may let as many wait there as the kernel allows.
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
