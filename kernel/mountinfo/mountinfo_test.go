package mountinfo

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

func TestRead(t *testing.T) {
	long := strings.Repeat("l", 100<<10)
	table := `22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw
146 44 0:4 net:[4026532537] /run/netns/a\040b rw shared:3 master:7 - nsfs nsfs rw
41 31 0:38 /part\011x /sys/fs/cgroup/part rw - cgroup2 cgroup2 rw,nsdelegate

not a line
1 2 3 - x
1 2 0:1 / relative rw - tmpfs tmpfs rw
60 22 0:50 / /over rw - overlay overlay rw,lowerdir=` + long + `
61 22 0:51 / /end\9 rw - fuse.x we\040 rw
`
	proc := t.TempDir()
	testkit.Must(t, os.MkdirAll(filepath.Join(proc, "7"), 0o755))
	testkit.Must(t, os.WriteFile(filepath.Join(proc, "7", "mountinfo"), []byte(table), 0o600))
	var got []Mount
	all := func(m Mount) bool { got = append(got, m); return true }
	testkit.Must(t, Read(proc, "7", all))
	want := []Mount{
		{"0:21", "/", "/", "ext4", "/dev/vda", "rw"},
		{"0:4", "net:[4026532537]", "/run/netns/a b", "nsfs", "nsfs", "rw"},
		{"0:38", "/part\tx", "/sys/fs/cgroup/part", "cgroup2", "cgroup2", "rw,nsdelegate"},
		{"0:50", "/", "/over", "overlay", "overlay", "rw,lowerdir=" + long},
		{"0:51", "/", `/end\9`, "fuse.x", "we ", "rw"},
	}
	testkit.Same(t, "mounts", want, got)
	n := 0
	if err := Read(proc, "7", func(Mount) bool { n++; return n < 2 }); err != nil || n != 2 {
		t.Errorf("%d mounts after a stop at the second, %v", n, err)
	}
	testkit.Is(t, "absent process", Read(proc, "8", all), fs.ErrNotExist)
}

// Whoever looks for something has to know that it may be further down.
func TestLong(t *testing.T) {
	line := "22 1 0:21 / /a rw - ext4 /dev/vda rw\n"
	for size, want := range map[int]error{maxTable: nil, maxTable + 1: ErrLong} {
		table := strings.Repeat(line, size/len(line)+1)[:size]
		n := 0
		if err := scan(strings.NewReader(table), func(Mount) bool { n++; return true }); err != want || n < size/len(line) {
			t.Errorf("%d bytes: %v, %d mounts", size, err, n)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`146 44 0:4 net:[4026532537] /run/netns/a\040b rw shared:3 - nsfs nsfs rw`)
	f.Add(`1 2 0:1 / /sys/fs/cgroup/\9 - cgroup2 c rw`)
	f.Add(" - nsfs ")
	f.Add(`1 2 0:1 / /a rw - nsfs - nsfs - x`)
	f.Fuzz(func(t *testing.T, s string) {
		m, ok := parse(s)
		if ok && (!strings.HasPrefix(m.Dir, "/") || strings.Contains(m.Type, " ")) {
			t.Errorf("%q gives %+v", s, m)
		}
		n := 0
		if err := scan(strings.NewReader(s), func(Mount) bool { n++; return true }); err != nil || n > strings.Count(s, "\n")+1 {
			t.Errorf("%q: %d mounts, %v", s, n, err)
		}
	})
}
