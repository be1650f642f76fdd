package discover

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	const rest = " S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000 200 18446744073709551615"
	for _, tc := range []struct {
		name, in string
		want     stat
		ok       bool
	}{
		{"plain", "7 (sh)" + rest, stat{4194560, 12345, false}, true},
		{"hostile name", "7 (a) R 9 9) 9 (x)" + rest, stat{4194560, 12345, false}, true},
		{"newline in name", "7 (a\nb)" + rest, stat{4194560, 12345, false}, true},
		{"ended", "7 (a) b) R) Z 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000 200", stat{4194560, 12345, true}, true},
		{"empty", "", stat{}, false},
		{"cut off", "7 (sh) S 1 1 1 0 -1 4194560", stat{}, false},
		{"no number", "7 (sh) S 1 1 1 0 -1 x 1 2 3 4 5 6 7 8 20 0 1 0 12345 1", stat{}, false},
		{"too late", "7 (sh) S 1 1 1 0 -1 1 1 2 3 4 5 6 7 8 20 0 1 0 18446744073709551615 1", stat{}, false},
	} {
		got, err := parseStat([]byte(tc.in))
		if got != tc.want || (err == nil) != tc.ok {
			t.Errorf("%s: %+v, %v, want %+v", tc.name, got, err, tc.want)
		}
	}
}

func FuzzStat(f *testing.F) {
	f.Add([]byte("7 (sh) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1000 200"))
	f.Add([]byte("7 (a) b) S 1 1 1 0 -1 x 1 2 3 4 5 6 7 8 20 0 1 0 -1 1000 200"))
	f.Add([]byte(") ("))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := parseStat(b)
		if err == nil && time.Duration(st.start)*(time.Second/userHZ) < 0 {
			t.Errorf("start time %d overflows", st.start)
		}
	})
}

func FuzzProcs(f *testing.F) {
	f.Add([]byte("1\n22\n333\n"))
	f.Add([]byte("0\n-1\n\n99999999999999999999\n7"))
	f.Fuzz(func(t *testing.T, b []byte) {
		pids := parseProcs(b)
		if len(pids) > maxProcs || slices.ContainsFunc(pids, func(pid int) bool { return pid <= 0 }) {
			t.Errorf("pids %v", pids)
		}
	})
}

func TestOpenProcess(t *testing.T) {
	boot, err := bootTime(time.Now)
	must(t, err)
	cmd := exec.Command("sleep", "1000")
	before := time.Now()
	must(t, cmd.Start())
	ended := make(chan struct{})
	p, err := openProcess("/proc", cmd.Process.Pid, boot, func() { close(ended) })
	must(t, err)
	defer p.close()
	// proc counts in hundredths of a second, rounded down.
	if p.started.Before(before.Add(-30*time.Millisecond)) || p.started.After(time.Now()) {
		t.Errorf("started at %v, want about %v", p.started, before)
	}
	if p.ended() {
		t.Error("ended while it runs")
	}
	cmd.Process.Kill()
	<-ended // even though it was not waited for
	if !p.ended() {
		t.Error("runs after its end")
	}
	// A zombie has nothing left to look at.
	if _, err := openProcess("/proc", cmd.Process.Pid, boot, func() {}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("zombie: %v, want ErrNotExist", err)
	}
	cmd.Wait()
	if _, err := openProcess("/proc", cmd.Process.Pid, boot, func() {}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no process: %v, want ErrNotExist", err)
	}
	self, err := openProcess("/proc", os.Getpid(), boot, func() { t.Error("this process has ended") })
	must(t, err)
	self.close()
}

// A host with more containers than one cgroup's processes are searched in has them side by side in
// one directory.
func TestSubdirsOfAFullHost(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 * maxDirs {
		must(t, os.Mkdir(filepath.Join(dir, strconv.Itoa(i)), 0o755))
	}
	tree := &tree{top: dir, nodes: make(map[string]*node), due: make(map[string]*node)}
	tree.walk()
	if got := len(tree.nodes); got != 3*maxDirs+1 {
		t.Errorf("walk found %d cgroups, want %d", got, 3*maxDirs+1)
	}
	if got := len(subdirs(dir, maxDirs)); got != maxDirs {
		t.Errorf("subdirs gave %d, want the bound %d", got, maxDirs)
	}
}
