package testkit

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// runVar marks the processes of one test run in their environment.
const runVar = "FAIRLEAD_TEST_RUN"

// Main runs the tests of a package and exits. It fails them if they leave behind on the host
// anything with fairlead's mark: names in /run/netns, cgroups, links and qdiscs of the host's
// namespace, pins in the BPF file systems, loop devices, and processes that they started. Use it as
//
//	func TestMain(m *testing.M) { testkit.Main(m) }
//
// Things that another process creates meanwhile count too, unless they vanish soon: packages with
// tests that change the host run one at a time. Fuzzing changes no host and runs beside them, so it
// is not held to this.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run is Main without the exit, for a TestMain that has to clean up afterwards. It returns the exit
// status.
func Run(m *testing.M) int {
	// Every process that the tests start inherits the variable, which identifies it even after its
	// parent has ended and it belongs to init.
	os.Setenv(runVar, strconv.Itoa(os.Getpid())) // fails for bad names only
	// Tests that run in parallel mostly wait, for windows and leases.
	flag.Set("test.parallel", "4") // fails for bad values only
	if flag.Parse(); flag.Lookup("test.fuzz").Value.String() != "" {
		return m.Run()
	}
	before := debris()
	code := m.Run()
	if left := settle(before, debris, patience); len(left) > 0 {
		fmt.Println("--- FAIL: these are left after the tests:")
		for _, what := range left {
			fmt.Println("    " + what)
		}
		code = max(code, 1)
	}
	return code
}

// settle waits until look finds nothing new, and returns what is new at the time limit. Leftovers
// of an ended process take a moment to vanish.
func settle(before []string, look func() []string, limit time.Duration) []string {
	deadline := time.Now().Add(limit)
	for {
		left := slices.DeleteFunc(look(), func(s string) bool { return slices.Contains(before, s) })
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// debris lists what a test of fairlead might leave on a host. It skips what cannot be read (without
// root, say), since the test cannot have created it either.
func debris() []string {
	var found []string
	add := func(kind string, names []string) {
		for _, name := range names {
			found = append(found, kind+" "+name)
		}
	}
	add("network namespace", marked("/run/netns"))
	add("cgroup", markedDirs("/sys/fs/cgroup"))
	for _, dir := range bpfMounts() {
		add("pin", marked(dir))
	}
	add("loop device", loops())
	add("process", processes(os.Getpid()))
	add("link or qdisc", linksAndQdiscs())
	return found
}

// ours reports whether a name carries fairlead's mark for objects on a host.
func ours(name string) bool {
	return strings.HasPrefix(name, "fl") || strings.HasPrefix(name, "fairlead")
}

// marked lists the entries of dir that carry our mark.
func marked(dir string) []string {
	entries, _ := os.ReadDir(dir)
	var found []string
	for _, e := range entries {
		if ours(e.Name()) {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found
}

// markedDirs lists the topmost directories below root that carry our mark.
func markedDirs(root string) []string {
	var found []string
	filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || !d.IsDir():
			return nil
		case path != root && ours(d.Name()):
			found = append(found, path)
			return fs.SkipDir
		}
		return nil
	})
	return found
}

// bpfMounts lists where BPF file systems are mounted.
func bpfMounts() []string {
	data, _ := os.ReadFile("/proc/self/mounts")
	var dirs []string
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "bpf" {
			dirs = append(dirs, f[1])
		}
	}
	return dirs
}

// loops lists the loop devices with a backing file.
func loops() []string {
	found, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for i, path := range found {
		file, _ := os.ReadFile(path)
		found[i] = fmt.Sprintf("%s (%s)", strings.Split(path, "/")[3], strings.TrimSpace(string(file)))
	}
	return found
}

// processes lists the processes that the test process with this pid started: its children, unreaped
// ones included, and every process with its mark in the environment.
func processes(pid int) []string {
	var pids []string
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range threads {
		data, _ := os.ReadFile(path)
		pids = append(pids, strings.Fields(string(data))...)
	}
	mark := fmt.Sprintf("%s=%d", runVar, pid)
	marked := withVariable(func(v string) bool { return v == mark })
	pids = append(pids, slices.DeleteFunc(marked, func(p string) bool { return p == strconv.Itoa(pid) })...)
	slices.Sort(pids)
	var found []string
	for _, p := range slices.Compact(pids) {
		found = append(found, named(p))
	}
	return found
}

// withVariable lists the processes whose initial environment has a variable for which is returns true.
func withVariable(is func(string) bool) (pids []string) {
	environs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range environs {
		data, _ := os.ReadFile(path)
		if slices.ContainsFunc(strings.Split(string(data), "\x00"), is) {
			pids = append(pids, strings.Split(path, "/")[2])
		}
	}
	return pids
}

// named returns a process's number with its name.
func named(pid string) string {
	comm, _ := os.ReadFile(filepath.Join("/proc", pid, "comm"))
	return fmt.Sprintf("%s (%s)", pid, strings.TrimSpace(string(comm)))
}

// linksAndQdiscs lists the links of this network namespace that carry our mark, and the qdiscs that
// are not the kernel's own (these have handle 0) on links that existed before any test.
func linksAndQdiscs() []string {
	var found []string
	links, _ := netlink.LinkList()
	for _, l := range links {
		if ours(l.Attrs().Name) {
			found = append(found, l.Attrs().Name)
		}
		qdiscs, _ := netlink.QdiscList(l)
		for _, q := range qdiscs {
			if q.Attrs().Handle != 0 {
				found = append(found, l.Attrs().Name+" "+q.Type()+" "+strconv.FormatUint(uint64(q.Attrs().Handle), 16))
			}
		}
	}
	return found
}
