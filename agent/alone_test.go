package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// fakeProc is what the kernel says of this process, as process 42 of a host of its own.
func fakeProc(t *testing.T) (proc string) {
	t.Helper()
	proc = t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(proc, "1/root"), 0o700), os.MkdirAll(filepath.Join(proc, "42/ns"), 0o700),
		os.Symlink("/proc/self/ns/net", filepath.Join(proc, "42/ns/net")), os.Symlink("42", filepath.Join(proc, "self"))); err != nil {
		t.Fatal(err)
	}
	return proc
}

func TestAlone(t *testing.T) {
	proc := fakeProc(t)
	first, err := alone(proc)
	testkit.Must(t, err)
	if _, err := alone(proc); !errors.Is(err, ErrTwo) || !strings.Contains(err.Error(), "process 42") {
		t.Errorf("a second agent: %v", err)
	}
	other, err := alone(fakeProc(t)) // of another host
	testkit.Must(t, err)
	other.Close()
	elsewhere := filepath.Join(proc, "42/ns/net")
	testkit.Must(t, errors.Join(os.Remove(elsewhere), os.Symlink("/proc/self/ns/mnt", elsewhere)))
	if other, err = alone(proc); err != nil {
		t.Fatalf("in another namespace: %v", err)
	}
	other.Close()
	testkit.Must(t, errors.Join(os.Remove(elsewhere), os.Symlink("/proc/self/ns/net", elsewhere), first.Close()))
	again, err := alone(proc)
	if err != nil {
		t.Fatalf("after the end of the first: %v", err)
	}
	again.Close()
}
