package cgroup

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// tree makes a directory with cgroup files: name, text, name, text...
func tree(t *testing.T, dir string, files ...string) string {
	t.Helper()
	testkit.Write(t, filepath.Join(dir, "cgroup.procs"), "")
	for i := 0; i < len(files); i += 2 {
		testkit.Write(t, filepath.Join(dir, files[i]), files[i+1])
	}
	return dir
}

func TestWeight(t *testing.T) {
	for _, c := range []struct {
		name  string
		files []string
		want  uint64
		is    error
	}{
		{"v2", []string{"cpu.weight", "100\n"}, 100, nil},
		{"v1", []string{"cpu.shares", "1024\n"}, 1024, nil},
		{"none", nil, 0, errors.ErrUnsupported},
		{"v2 idle, Debian's 6.1", []string{"cpu.weight", "0\n", "cpu.idle", "1\n"}, 0, nil},
		{"v2 idle", []string{"cpu.weight", "1\n", "cpu.idle", "1\n"}, 0, nil},
		{"v1 idle", []string{"cpu.shares", "3\n", "cpu.idle", "1\n"}, 0, nil},
		{"v1 light", []string{"cpu.shares", "2\n", "cpu.idle", "0\n"}, 2, nil},
		{"v2 light", []string{"cpu.weight", "1\n", "cpu.idle", "0\n"}, 1, nil},
	} {
		got, err := Weight(tree(t, filepath.Join(t.TempDir(), "cg"), c.files...))
		if got != c.want || !errors.Is(err, c.is) {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
	}
	for _, bad := range []string{"", "0", "-1", "x", "1 2", "99999999999999999999"} {
		testkit.Fails(t, bad, testkit.Err(Weight(tree(t, filepath.Join(t.TempDir(), "cg"), "cpu.weight", bad))))
	}
}

func TestCPUs(t *testing.T) {
	root := tree(t, filepath.Join(t.TempDir(), "cg"), "cpuset.cpus.effective", "0-3\n")
	set := tree(t, filepath.Join(root, "set"), "cpuset.cpus.effective", "2\n")
	inherits := tree(t, filepath.Join(set, "pod", "container"))
	tree(t, filepath.Join(set, "pod"))
	v1 := tree(t, filepath.Join(t.TempDir(), "cg"), "cpuset.effective_cpus", "0,2\n")
	without := tree(t, filepath.Join(t.TempDir(), "cg"))
	for _, c := range []struct {
		dir  string
		want []int
		is   error
	}{
		{root, []int{0, 1, 2, 3}, nil},
		{set, []int{2}, nil},
		{inherits, []int{2}, nil},
		{v1, []int{0, 2}, nil},
		{without, nil, errors.ErrUnsupported},
		{filepath.Join(root, "gone"), nil, journal.ErrGone},
	} {
		got, err := CPUs(c.dir)
		if !slices.Equal(got, c.want) || !errors.Is(err, c.is) {
			t.Errorf("%s: %v, %v", c.dir, got, err)
		}
	}
}

func TestCPUList(t *testing.T) {
	for _, c := range []struct {
		list string
		want []int
		back string
	}{
		{"", nil, ""},
		{"0", []int{0}, "0"},
		{"0-3,8", []int{0, 1, 2, 3, 8}, "0-3,8"},
		{"8,0,1", []int{0, 1, 8}, "0-1,8"},
		{"3,3,2-4", []int{2, 3, 4}, "2-4"},
		{"8191", []int{8191}, "8191"},
	} {
		got, err := ParseCPUs(c.list)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q: %v, %v", c.list, got, err)
		}
		if back := FormatCPUs(got); back != c.back {
			t.Errorf("%q comes back as %q, want %q", c.list, back, c.back)
		}
	}
	for _, bad := range []string{",", "1,", "-", "1-", "-1", "3-2", "8192", "0-99999999999", "a", "1 2", " 1", "0-4:1/2"} {
		testkit.Fails(t, bad, testkit.Err(ParseCPUs(bad)))
	}
	testkit.Same(t, "unsorted input", "1-3", FormatCPUs([]int{3, 1, 2, 1}))
}

func FuzzParseCPUs(f *testing.F) {
	testkit.Seeds(f, "", "0", "0-3,8", "1-", ",", "0-8191", "3-2", "99999999999999999999")
	f.Fuzz(func(t *testing.T, s string) {
		cpus, err := ParseCPUs(s)
		if err != nil {
			return
		}
		if !slices.IsSorted(cpus) || len(cpus) > maxCPU+1 {
			t.Fatalf("%q gives %v", s, cpus)
		}
		again, err := ParseCPUs(FormatCPUs(cpus))
		if err != nil || !slices.Equal(cpus, again) {
			t.Fatalf("%q: %v became %v, %v", s, cpus, again, err)
		}
	})
}
