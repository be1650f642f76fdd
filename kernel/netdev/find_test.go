package netdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/journal"
)

// procs is a proc in a temporary folder.
type procs struct {
	t   *testing.T
	dir string
}

func newProcs(t *testing.T) procs {
	p := procs{t, t.TempDir()}
	p.add("self", 1, 1, "")
	return p
}

// add makes a process, by its network and mount namespaces and its mounts.
func (p procs) add(pid string, net, mnt int, mounts string) {
	p.t.Helper()
	ns := filepath.Join(p.dir, pid, "ns")
	if err := errors.Join(
		os.MkdirAll(ns, 0o755),
		os.Symlink(fmt.Sprintf("net:[%d]", net), filepath.Join(ns, "net")),
		os.Symlink(fmt.Sprintf("mnt:[%d]", mnt), filepath.Join(ns, "mnt")),
		os.WriteFile(filepath.Join(p.dir, pid, "mountinfo"), []byte(mounts), 0o600),
	); err != nil {
		p.t.Fatal(err)
	}
}

func nsfs(inode int, dir string) string {
	return fmt.Sprintf("146 44 0:4 net:[%d] %s rw - nsfs nsfs rw\n", inode, dir)
}

// A node with mounts that hide others has paths that lead elsewhere: the next is tried. One's own
// namespace needs no path.
func TestHiddenMounts(t *testing.T) {
	own, err := InodeOf("/proc", os.Getpid())
	must(t, err)
	dir := t.TempDir()
	hidden, good := filepath.Join(dir, "hidden"), filepath.Join(dir, "good")
	must(t, errors.Join(os.WriteFile(hidden, nil, 0o600), os.Symlink("/proc/self/ns/net", good)))
	p := newProcs(t)
	p.add("100", int(own), 2, "") // has ended since, or is none of a real proc
	mounts := func(text string) {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(p.dir, "self", "mountinfo"), []byte(text), 0o600))
	}
	opens := func(f *Finder) {
		t.Helper()
		ns, err := f.Open("", own)
		must(t, err)
		defer ns.Close()
		testkit.Same(t, "netns", own, ns.Inode())
	}
	mounts(nsfs(int(own), hidden) + nsfs(int(own), good))
	opens(NewFinder(p.dir, time.Now))
	mounts(nsfs(int(own), hidden))
	if ns, err := NewFinder(p.dir, time.Now).Open("", own); err == nil {
		t.Errorf("netns %d by a path that leads elsewhere", ns.Inode())
	}
	f := NewFinder("/proc", time.Now)
	opens(f)
	testkit.Gives(t, "the own namespace is at", "/proc/self/ns/net")(f.Find(own))
}

// After an incomplete search a namespace is not known to have gone.
func TestCutOff(t *testing.T) {
	p := newProcs(t)
	for i := range 4 {
		p.add(fmt.Sprint(100+i), 100+i, 100+i, nsfs(200+i, "/a")+nsfs(300+i, "/b"))
	}
	p.add("200", 1, 100, nsfs(200, "/a")+nsfs(300, "/b")) // shares a mount namespace, and may be seen first
	unreadable := newProcs(t)
	unreadable.add("100", 100, 100, "")
	for _, link := range []string{"net", "mnt"} {
		path := filepath.Join(unreadable.dir, "100/ns", link)
		must(t, os.Remove(path))
		must(t, os.WriteFile(path, nil, 0o600)) // EINVAL
	}
	for _, c := range []struct {
		name string
		bounds
		p   procs
		cut bool
	}{
		{"as many as there are", bounds{5, 4, 8}, p, false},
		{"processes", bounds{4, 4, 8}, p, true},
		{"mount namespaces", bounds{5, 3, 8}, p, true},
		{"mounts", bounds{5, 4, 7}, p, true},
		{"a process that cannot be looked at", ordinary(), unreadable, true},
	} {
		want := ErrNoNS
		if c.cut {
			want = errCutOff
		}
		for _, f := range []*Finder{NewFinder(c.p.dir, time.Now), NewGlance(c.p.dir, nil)} {
			f.bounds = c.bounds
			testkit.Is(t, c.name, testkit.Err(f.Find(1000)), want)
			ref := journal.Ref{Kind: KindThreaded, Object: "1000/1/"}
			if _, err := OpenKnob(f, ref); err == nil || errors.Is(err, journal.ErrGone) == c.cut {
				t.Errorf("%s: knob: %v", c.name, err)
			}
		}
	}
}

// A Finder looks again for a namespace that it has not seen, a glance does not; neither looks again
// for one that it has seen.
func TestLooks(t *testing.T) {
	p := newProcs(t)
	p.add("100", 100, 100, nsfs(200, "/a"))
	clock := time.Unix(0, 0)
	finder, glance := NewFinder(p.dir, func() time.Time { return clock }), NewGlance(p.dir, nil)
	want := func(when string, f *Finder, inode uint64, path string) {
		t.Helper()
		if path != "" {
			path = filepath.Join(p.dir, path)
		}
		if got, err := f.Find(inode); got != path || (err == nil) != (path != "") || err != nil && !errors.Is(err, ErrNoNS) {
			t.Errorf("%s: %d is at %q, %v, want %q", when, inode, got, err, path)
		}
	}
	for _, f := range []*Finder{finder, glance} {
		want("first", f, 100, "100/ns/net")
		want("first", f, 200, "100/root/a")
	}
	p.add("101", 101, 101, nsfs(201, "/a"))
	want("later", finder, 101, "101/ns/net")
	want("later", glance, 101, "")
	want("at once", finder, 201, "")
	clock = clock.Add(time.Second)
	want("a second later", finder, 201, "101/root/a")
	want("later", glance, 201, "")
	must(t, os.RemoveAll(filepath.Join(p.dir, "100")))
	want("gone", finder, 100, "100/ns/net") // without a look
	for _, f := range []*Finder{finder, glance} {
		// Opening notices.
		testkit.Is(t, "gone", testkit.Err(f.Open("", 100)), ErrNoNS)
		want("after another look", f, 101, "101/ns/net")
	}
}
