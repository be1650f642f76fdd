package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

const hybridMounts = `31 23 0:28 / ROOT rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / ROOT/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / ROOT/cpuset rw,relatime - cgroup cgroup rw,cpuset
38 31 0:35 / ROOT/blkio rw,relatime - cgroup cgroup rw,blkio
39 31 0:35 / ROOT/other rw,relatime - cgroup cgroup rw,blkio
40 31 0:37 / ROOT/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / ROOT/unified rw,relatime - cgroup2 cgroup2 rw
42 31 0:38 /part ROOT/part rw,relatime - cgroup2 cgroup2 rw
43 31 0:38 / /elsewhere rw,relatime - cgroup2 cgroup2 rw
`

func fakeHost(t *testing.T, mounts string, v2 string, controllers string) (proc, root string) {
	t.Helper()
	dir := t.TempDir()
	proc, root = filepath.Join(dir, "proc"), filepath.Join(dir, "cg")
	testkit.Write(t, filepath.Join(proc, "self", "mountinfo"), strings.ReplaceAll(mounts, "ROOT", root))
	if v2 != "-" {
		testkit.Write(t, filepath.Join(root, v2, "cgroup.controllers"), controllers)
	}
	return proc, root
}

func TestDetect(t *testing.T) {
	for _, tc := range []struct {
		name, mounts, v2, controllers string
		want                          Layout
	}{
		{"hybrid", hybridMounts, "unified", "", Layout{V2: "/unified", CPU: "/cpu,cpuacct", CPUSet: "/cpuset", IO: "/blkio", Mode: ModeHybrid}},
		{"v2", "41 31 0:38 / ROOT rw - cgroup2 cgroup2 rw\n", "", "cpuset cpu io memory pids\n", Layout{V2: "/", CPU: "/", CPUSet: "/", IO: "/", Mode: ModeV2}},
		{"v2 without io", "41 31 0:38 / ROOT rw - cgroup2 cgroup2 rw\n", "", "cpuset cpu\n", Layout{V2: "/", CPU: "/", CPUSet: "/", Mode: ModeV2}},
		{"hybrid with io on v2", "32 31 0:29 / ROOT/cpu rw - cgroup cgroup rw,cpu\n41 31 0:38 / ROOT/unified rw - cgroup2 cgroup2 rw\n", "unified", "io\n",
			Layout{V2: "/unified", CPU: "/cpu", IO: "/unified", Mode: ModeHybrid}},
		{"v1", "32 31 0:29 / ROOT/cpu rw - cgroup cgroup rw,cpu\n", "-", "", Layout{CPU: "/cpu", Mode: ModeV1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			proc, root := fakeHost(t, tc.mounts, tc.v2, tc.controllers)
			got, err := Detect(proc, root)
			must(t, err)
			for _, p := range []*string{&tc.want.V2, &tc.want.CPU, &tc.want.CPUSet, &tc.want.IO} {
				if *p != "" {
					*p = filepath.Join(root, *p)
				}
			}
			testkit.Same(t, "layout", tc.want, got)
		})
	}
}

func TestDetectNothing(t *testing.T) {
	proc, root := fakeHost(t, "31 23 0:28 / ROOT rw - tmpfs tmpfs rw\n", "-", "")
	testkit.Is(t, "no hierarchy", testkit.Err(Detect(proc, root)), ErrNone)
	testkit.Is(t, "no proc", testkit.Err(Detect(filepath.Join(proc, "nowhere"), root)), fs.ErrNotExist)
}

func TestOfPID(t *testing.T) {
	hybrid := Layout{V2: "/cg/unified", CPU: "/cg/cpu,cpuacct", CPUSet: "/cg/cpuset", IO: "/cg/blkio", Mode: ModeHybrid}
	v2 := Layout{V2: "/cg", CPU: "/cg", IO: "/cg", Mode: ModeV2}
	for _, tc := range []struct {
		name    string
		layout  Layout
		content string
		want    Paths
		err     error
	}{
		{"hybrid", hybrid, "9:name=systemd:/\n7:blkio:/d/x\n3:cpuset:/d/y\n2:cpuacct,cpu:/d/z\n0::/d/u\n",
			Paths{V2: "/cg/unified/d/u", CPU: "/cg/cpu,cpuacct/d/z", CPUSet: "/cg/cpuset/d/y", IO: "/cg/blkio/d/x"}, nil},
		{"v2", v2, "0::/kubepods.slice/pod:1/c\n", Paths{V2: "/cg/kubepods.slice/pod:1/c", CPU: "/cg/kubepods.slice/pod:1/c", IO: "/cg/kubepods.slice/pod:1/c"}, nil},
		{"root", v2, "0::/\n", Paths{V2: "/cg", CPU: "/cg", IO: "/cg"}, nil},
		{"above our namespace", v2, "0::/../other\n", Paths{}, ErrOutside},
		{"removed", v2, "0::/gone (deleted)\n", Paths{}, ErrOutside},
		{"no v2 line", v2, "1:cpu:/x\n", Paths{}, ErrOutside},
		{"garbage", v2, "::::\n\x00\n", Paths{}, ErrOutside},
		{"v1 only", Layout{CPU: "/cg/cpu", Mode: ModeV1}, "1:cpu:/x\n", Paths{CPU: "/cg/cpu/x"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			proc := t.TempDir()
			testkit.Write(t, filepath.Join(proc, "7", "cgroup"), tc.content)
			got, err := tc.layout.OfPID(proc, 7)
			if !errors.Is(err, tc.err) {
				t.Fatalf("error %v, want %v", err, tc.err)
			}
			testkit.Same(t, "paths", tc.want, got)
			testkit.Is(t, "absent process", testkit.Err(tc.layout.OfPID(proc, 8)), fs.ErrNotExist)
		})
	}
}

// TestThisHost compares Detect with what the kernel shows for this process.
func TestThisHost(t *testing.T) {
	testkit.OnKernels(t)
	l, err := Detect("/proc", "")
	must(t, err)
	p, err := l.OfPID("/proc", os.Getpid())
	must(t, err)
	for _, dir := range []string{p.V2, p.CPU, p.CPUSet, p.IO} {
		if dir == "" {
			continue
		}
		if id, err := ID(dir); err != nil || id == 0 {
			t.Errorf("ID(%s) = %d, %v", dir, id, err)
		}
	}
	testkit.Fails(t, "ID of a file", testkit.Err(ID("/proc/self/cgroup")))
}

func FuzzPIDCgroup(f *testing.F) {
	f.Add("9:name=systemd:/\n7:blkio:/d/x\n2:cpuacct,cpu:/d/z\n0::/d/u\n")
	f.Add("0::/../../etc\n")
	f.Add("0::/a/../../../b\n0::/ok\n1:cpu:x\n")
	f.Fuzz(func(t *testing.T, s string) {
		l := Layout{V2: "/cg/unified", CPU: "/cg/cpu", IO: "/cg/unified"}
		p, err := l.parsePID(strings.NewReader(s))
		if err != nil {
			return
		}
		for path, mount := range map[string]string{p.V2: l.V2, p.CPU: l.CPU, p.IO: l.IO} {
			if path != "" && !below(path, mount) {
				t.Errorf("path %q escapes from %s", path, mount)
			}
		}
	})
}
