package enter

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// The test binary as a program in a container: in a cgroup namespace of its own, and then, after
// that, where it prints its own cgroups. The last argument is where proc is.
const (
	confinedVerb = "enter-confined"
	seesVerb     = "enter-sees"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == confinedVerb {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWCGROUP)
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
	testkit.NeedRoot(t)
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
