package enter

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The test binary as a program in a container: in a cgroup namespace of its own, and then, after
// that, where it prints its own cgroups. The last argument is where proc is.
const (
	confinedVerb = "enter-confined"
	outsideVerb  = "enter-outside" // with a pause in between, in which it can be moved out of the namespace's root
	seesVerb     = "enter-sees"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && (os.Args[1] == confinedVerb || os.Args[1] == outsideVerb) {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWCGROUP)
		if os.Args[1] == outsideVerb {
			fmt.Println("confined")
			fmt.Scanln()
		}
		if err == nil {
			err = unix.Exec("/proc/self/exe", []string{os.Args[0], seesVerb, os.Args[2]}, os.Environ())
		}
		fmt.Println(err)
		os.Exit(1)
	}
	if len(os.Args) == 3 && os.Args[1] == seesVerb {
		if err := HostCgroups(os.Args[2]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		own, err := os.ReadFile("/proc/self/cgroup")
		fmt.Printf("%s%v", own, err)
		os.Exit(0)
	}
	testkit.Main(m)
}

// TestHostCgroups starts a program in a cgroup and a cgroup namespace of its own, as a runtime does
// on cgroup v2: proc names its cgroup by the host's path again.
func TestHostCgroups(t *testing.T) {
	group := testkit.Cgroup(t)
	// It must be in the cgroup before it makes the namespace.
	self, err := os.Executable()
	testkit.Must(t, err)
	proc := t.TempDir() // this process stands for process 1, which a machine may hide
	testkit.Must(t, os.Symlink(fmt.Sprintf("/proc/%d", os.Getpid()), filepath.Join(proc, "1")))
	cmd := exec.Command("sh", "-c", `read go; exec "$0" "$@"`, self, confinedVerb, proc)
	in, err := cmd.StdinPipe()
	testkit.Must(t, err)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	testkit.Must(t, cmd.Start())
	group.Add(t, cmd.Process.Pid)
	fmt.Fprintln(in, "go")
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, &out)
	}
	want := group.V2[strings.LastIndex(group.V2, "/"):]
	if !strings.Contains(out.String(), want+"\n") || strings.Contains(out.String(), "..") {
		t.Errorf("it sees itself in\n%s\nwant a path with %s", &out, want)
	}
}

// TestOutsideRoot has a process 1 that was moved out of the root of its cgroup namespace: there is
// no namespace to join that would help.
func TestOutsideRoot(t *testing.T) {
	group := testkit.Cgroup(t)
	root, elsewhere := group.Child(t, "root"), group.Child(t, "elsewhere")
	self, err := os.Executable()
	testkit.Must(t, err)
	proc := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // it may execute itself for ever
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", `read go; exec "$0" "$@"`, self, outsideVerb, proc)
	in, err := cmd.StdinPipe()
	testkit.Must(t, err)
	out, err := cmd.StdoutPipe()
	testkit.Must(t, err)
	testkit.Must(t, cmd.Start())
	testkit.Must(t, os.Symlink(fmt.Sprintf("/proc/%d", cmd.Process.Pid), filepath.Join(proc, "1")))
	root.Add(t, cmd.Process.Pid)
	fmt.Fprintln(in, "go")
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); line != "confined\n" {
		t.Errorf("%q, %v", line, err)
	}
	elsewhere.Add(t, cmd.Process.Pid)
	fmt.Fprintln(in)
	text, err := io.ReadAll(lines)
	testkit.Must(t, err)
	if err := cmd.Wait(); err == nil || !strings.Contains(string(text), "outside the root of its own cgroup namespace") {
		t.Errorf("%v: %s", err, text)
	}
}
