package policy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	testkit.Must(t, os.WriteFile(path, []byte(text), 0o644))
}

func TestLoadDir(t *testing.T) {
	dir := t.TempDir()
	if p, err := LoadDir(filepath.Join(dir, "none")); err != nil || p.Len() != 0 {
		t.Fatalf("a missing directory: %v, %v", p, err)
	}
	write(t, filepath.Join(dir, "20.yml"), all("netcpu: auto"))
	write(t, filepath.Join(dir, "10.yaml"), all("netcpu: isolate, net.weight: 3"))
	write(t, filepath.Join(dir, ".30.yaml"), "broken")
	write(t, filepath.Join(dir, "40.yaml~"), "broken")
	testkit.Must(t, os.Symlink("10.yaml", filepath.Join(dir, "05.yaml")))
	p, err := LoadDir(dir)
	testkit.Must(t, err)
	if got, want := fmt.Sprint(p.Files()), fmt.Sprint([]string{dir + "/05.yaml", dir + "/10.yaml", dir + "/20.yml"}); got != want {
		t.Errorf("Files = %s, want %s", got, want)
	}
	targets, _ := p.Resolve([]container.Container{{ID: 1}})
	want := "fairlead.net.weight=3 (" + dir + "/10.yaml:2)\nfairlead.netcpu=auto (" + dir + "/20.yml:2)"
	testkit.Same(t, "origins", want, originText(targets[0].Origins))
}

func TestLoadDirErrors(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "1.yaml"), "x: 1\n")
	write(t, filepath.Join(dir, "2.yaml"), all("netcpu: isolate"))
	write(t, filepath.Join(dir, "3.yaml"), "y: 1\n")
	testkit.Must(t, os.Mkdir(filepath.Join(dir, "4.yaml"), 0o755))
	testkit.Must(t, syscall.Mkfifo(filepath.Join(dir, "5.yaml"), 0o644))
	testkit.Must(t, os.Symlink("gone", filepath.Join(dir, "6.yaml")))
	testkit.Must(t, os.Symlink("/dev/zero", filepath.Join(dir, "8.yaml")))
	write(t, filepath.Join(dir, "7.yaml"), string(make([]byte, MaxFileSize+1)))
	p, err := LoadDir(dir)
	want := dir + "/4.yaml: is not a regular file\n" + dir + "/5.yaml: is not a regular file\n" + dir + "/6.yaml: open: no such file or directory\n" +
		dir + "/7.yaml: is larger than 65536 bytes\n" + dir + "/8.yaml: is not a regular file\n" + dir + "/1.yaml:1:1: x: unknown key\n" + dir + "/3.yaml:1:1: y: unknown key"
	if p != nil || err == nil || err.Error() != want {
		t.Errorf("policy %v, error\n%v\nwant\n%s", p, err, want)
	}
	var problems Problems
	if !errors.As(err, &problems) || problems[0].File != dir+"/4.yaml" {
		t.Errorf("errors.As finds %v", problems)
	}

	many := t.TempDir()
	for i := range MaxFiles + 1 {
		write(t, filepath.Join(many, fmt.Sprintf("%d.yaml", i)), "")
	}
	want = many + ": has 257 policy files, more than 256"
	testkit.Same(t, "error", want, fmt.Sprint(testkit.Err(LoadDir(many))))
	notDir := filepath.Join(many, "1.yaml")
	testkit.Fails(t, "a file as a directory", testkit.Err(LoadDir(notDir)))
}

// ticking returns a clock that advances by a second with each reading.
func ticking() func() time.Time {
	now := time.Unix(1000, 0)
	return func() time.Time { now = now.Add(time.Second); return now }
}

func TestReloadKeepsLastGood(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")
	s := NewStore(dir, ticking())
	write(t, a, all("netcpu: isolate"))
	testkit.Must(t, s.Reload())
	if st := s.Status(); st.Err != nil || st.Policies != 1 || len(st.Files) != 1 || !st.LastSuccess.Equal(time.Unix(1001, 0)) || !st.LastLoad.Equal(st.LastSuccess) {
		t.Errorf("after success: %+v", st)
	}

	write(t, a, all("netcpu: auto")) // valid, but nothing of a broken whole may count
	write(t, b, "broken: 1\n")
	want := b + ":1:1: broken: unknown key"
	testkit.Same(t, "error", want, fmt.Sprint(s.Reload()))
	testkit.Same(t, "after a broken file", NetCPUIsolate, netcpuOf(s))
	if st := s.Status(); st.Err == nil || st.Policies != 1 || !st.LastSuccess.Equal(time.Unix(1001, 0)) || !st.LastLoad.Equal(time.Unix(1002, 0)) {
		t.Errorf("after a broken file: %+v", st)
	}

	testkit.Must(t, os.Remove(b))
	testkit.Must(t, s.Reload())
	testkit.Same(t, "after mending", NetCPUAuto, netcpuOf(s))
	testkit.Must(t, os.RemoveAll(dir))
	testkit.Must(t, s.Reload())
	if got, st := netcpuOf(s), s.Status(); got != "" || st.Err != nil || st.Policies != 0 {
		t.Errorf("without a directory: %q is in force, %+v", got, st)
	}
}

// TestReloadNeverGood: as long as no one knows whether labels are denied, they are.
func TestReloadNeverGood(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), "broken: 1\n")
	s := NewStore(dir, ticking())
	labelled := []container.Container{{ID: 1, Name: "x", Labels: map[string]string{"fairlead.netcpu": "isolate"}}, {ID: 2, Name: "y"}}
	for range 2 {
		if err := s.Reload(); err == nil {
			t.Fatal("a broken file is loaded")
		}
		targets, problems := s.Resolve(labelled)
		want := `container "x" (1): fairlead.netcpu: "isolate": is ignored: the policy files are broken, and may deny labels`
		if got := Problems(problems).Error(); got != want || len(targets[0].Origins) > 0 {
			t.Errorf("origins %v, problems %s", targets[0].Origins, got)
		}
	}
	write(t, filepath.Join(dir, "a.yaml"), "")
	testkit.Must(t, s.Reload())
	if targets, problems := s.Resolve(labelled); targets[0].Settings.NetCPU != NetCPUIsolate || len(problems) > 0 {
		t.Errorf("after mending: %+v, problems %v", targets[0].Settings, problems)
	}
}

// TestIdle: a policy that matches nothing
// for an hour is reported, while there is anything that it could match.
func TestIdle(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	now := time.Unix(1000, 0)
	s := NewStore(dir, func() time.Time { return now })
	const two = "policies:\n- match: {name: web}\n  set: {netcpu: isolate}\n- match: {image: 'ngnix:*'}\n  set: {netcpu: isolate}\n"
	write(t, file, two)
	testkit.Must(t, s.Reload())
	web := container.Container{ID: 1, Name: "web", Source: "docker", Image: "nginx"}
	idle := func() string { return fmt.Sprint(s.Status().Idle) }
	pass := func(d time.Duration, list ...container.Container) {
		now = now.Add(d)
		s.Resolve(list)
	}
	pass(59*time.Minute, web)
	testkit.Same(t, "within the hour", "[]", idle())
	pass(2*time.Minute, web)
	testkit.Same(t, "after the hour", fmt.Sprint([]Idle{{file, 4, time.Unix(1000, 0)}}), idle())
	// A reload of unchanged files changes nothing; another pattern starts its own hour.
	testkit.Must(t, s.Reload())
	if got := idle(); got == "[]" {
		t.Error("a reload begins the hour anew")
	}
	write(t, file, strings.Replace(two, "ngnix", "nginxx", 1))
	testkit.Must(t, s.Reload())
	testkit.Same(t, "a new pattern at once", "[]", idle())
	pass(30*time.Minute, web)
	pass(61*time.Minute, container.Container{ID: 2, Name: "web", Source: container.CgroupSource})
	testkit.Same(t, "while no container ran", "[]", idle())
	pass(0, web)
	if got := idle(); !strings.Contains(got, "a.yaml 4 ") || strings.Contains(got, "a.yaml 2 ") {
		t.Errorf("with one again: %s", got)
	}
}

// TestRecall: the last good policy of an earlier Store is in force while there is no newer one, and
// is reported as such.
func TestRecall(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	write(t, file, all("netcpu: isolate"))
	first := NewStore(dir, ticking())
	if k := first.Kept(); !k.When.IsZero() {
		t.Errorf("kept before a load: %+v", k)
	}
	testkit.Must(t, first.Reload())
	write(t, file, all("netcpu: isolat"))
	if first.Reload() == nil {
		t.Fatal("a broken file is loaded")
	}
	kept := first.Kept()

	next := NewStore(dir, ticking())
	testkit.Must(t, next.Recall(kept))
	if next.Reload() == nil {
		t.Fatal("a broken file is loaded")
	}
	if st := next.Status(); netcpuOf(next) != NetCPUIsolate || st.Err == nil || !st.LastSuccess.Equal(time.Unix(1001, 0)) || st.Policies != 1 {
		t.Errorf("after Recall: %q is in force, %+v", netcpuOf(next), st)
	}
	if again := next.Kept(); len(again.Files) != 1 || again.Files[0] != kept.Files[0] || !again.When.Equal(kept.When) {
		t.Errorf("kept for the next: %+v, was %+v", again, kept)
	}
	write(t, file, all("netcpu: auto"))
	testkit.Must(t, next.Reload())
	testkit.Same(t, "after mending", NetCPUAuto, netcpuOf(next))

	other := NewStore(t.TempDir(), ticking())
	testkit.Must(t, other.Recall(kept))
	testkit.Same(t, "of another directory", NetCPU(""), netcpuOf(other))
	kept.Files[0].Text = "broken: 1"
	late := NewStore(dir, ticking())
	if err := late.Recall(kept); err == nil || netcpuOf(late) != "" {
		t.Errorf("what is not valid any more: %v, %q is in force", err, netcpuOf(late))
	}
}

// netcpuOf is what the policy of s sets for any container.
func netcpuOf(s *Store) NetCPU {
	targets, _ := s.Policy().Resolve([]container.Container{{ID: 1, Name: "x"}})
	return targets[0].Settings.NetCPU
}

func TestStoreKeepsLastGoodSettings(t *testing.T) {
	s := NewStore("", nil)
	hand := Override{Container: 1, Key: "io.realtime", Value: "30ms", From: "hand"}
	const host = "labels: host\nmatch: {name: x}\n"
	type m = map[string]string
	for i, step := range []struct {
		labels   m
		files    []string
		want     string
		problems int
		hand     []Override
	}{
		// A broken annotation: its last good value stands in, other policy goes on.
		{m{"fairlead.net.rate": "2mbit"}, []string{all("netcpu: auto, net.rate: 1mbit")}, "fairlead.net.rate=2mbit (label)\nfairlead.netcpu=auto (p/1.yaml:2)", 0, nil},
		{m{"fairlead.net.rate": "fast"}, []string{all("netcpu: isolate, net.rate: 1mbit")}, "fairlead.net.rate=2mbit (label)\nfairlead.netcpu=isolate (p/1.yaml:2)", 1, nil},
		{m{"fairlead.net.rate": "fast"}, []string{all("netcpu: auto")}, "fairlead.net.rate=2mbit (label)\nfairlead.netcpu=auto (p/1.yaml:2)", 1, nil},
		// Gone, it is gone.
		{nil, []string{all("net.rate: 1mbit")}, "fairlead.net.rate=1mbit (p/1.yaml:2)", 0, nil},
		// A value from a file never stands in for a broken label.
		{m{"fairlead.net.rate": "fast"}, nil, "", 1, nil},
		{m{"fairlead.net.rate": "fast"}, []string{all("net.rate: 3mbit")}, "fairlead.net.rate=3mbit (p/1.yaml:2)", 1, nil},
		// A file comes to contradict the label: both stay as they were.
		{m{"fairlead.net.rate": "4mbit"}, []string{all("net.ceil: 8mbit")}, "fairlead.net.ceil=8mbit (p/1.yaml:2)\nfairlead.net.rate=4mbit (label)", 0, nil},
		{m{"fairlead.net.rate": "4mbit"}, []string{all("net.ceil: 2mbit, netcpu: auto")}, "fairlead.net.ceil=8mbit (p/1.yaml:2)\nfairlead.net.rate=4mbit (label)\nfairlead.netcpu=auto (p/1.yaml:2)", 1, nil},
		{m{"fairlead.net.rate": "4mbit"}, []string{all("net.ceil: 2mbit")}, "fairlead.net.ceil=8mbit (p/1.yaml:2)\nfairlead.net.rate=4mbit (label)", 1, nil},
		{m{"fairlead.net.rate": "1mbit"}, []string{all("net.ceil: 2mbit")}, "fairlead.net.ceil=2mbit (p/1.yaml:2)\nfairlead.net.rate=1mbit (label)", 0, nil},
		// What it fell back to is not remembered: the file may go on changing.
		{nil, nil, "", 0, nil},
		{m{"fairlead.net.rate": "4mbit"}, []string{all("net.ceil: 2mbit")}, "fairlead.net.ceil=2mbit (p/1.yaml:2)", 1, nil},
		{m{"fairlead.net.rate": "4mbit"}, []string{all("net.ceil: 3mbit")}, "fairlead.net.ceil=3mbit (p/1.yaml:2)", 1, nil},
		// A value that a label was once allowed to set does not stand in for it later. A setting by hand
		// needs no label.
		{m{"fairlead.io.realtime": "20ms"}, []string{host}, "fairlead.io.realtime=20ms (label)", 0, nil},
		{m{"fairlead.io.realtime": "fast"}, []string{host}, "fairlead.io.realtime=20ms (label)", 1, nil},
		{m{"fairlead.io.realtime": "20ms"}, []string{host}, "fairlead.io.realtime=20ms (label)", 0, nil},
		{m{"fairlead.io.realtime": "fast"}, nil, "", 1, nil},
		{m{"fairlead.io.realtime": "20ms"}, nil, "", 1, nil},
		{m{"fairlead.io.realtime": "20ms"}, nil, "fairlead.io.realtime=30ms (hand)", 0, []Override{hand}},
	} {
		testkit.Must(t, s.Override(step.hand))
		s.use(join(t, step.files...), nil, time.Time{}, time.Time{})
		targets, problems := s.Resolve([]container.Container{{ID: 1, Name: "x", Labels: step.labels}})
		if got := originText(targets[0].Origins); got != step.want || len(problems) != step.problems {
			t.Fatalf("step %d: %v\n%s\nwant %d\n%s", i, problems, got, step.problems, step.want)
		}
	}

	// The memory goes with the container.
	if s.Resolve(nil); len(s.last) != 0 {
		t.Error("a container that is gone is remembered")
	}
}

// watch watches a directory and gives a function that waits until cond holds, woken by onChange alone.
func watch(t *testing.T, dir string, poll time.Duration) (s *Store, await func(what string, cond func() bool)) {
	t.Helper()
	s = NewStore(dir, time.Now)
	s.poll = poll
	changed := make(chan struct{}, 100)
	stop := testkit.Background(t, func(ctx context.Context) error { return s.Watch(ctx, func() { changed <- struct{}{} }) })
	t.Cleanup(func() { testkit.Is(t, "Watch", stop(), context.Canceled) })
	return s, func(what string, cond func() bool) {
		t.Helper()
		deadline := time.After(90 * time.Second)
		for !cond() {
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("%s: not noticed; status %+v", what, s.Status())
			}
		}
	}
}

func TestWatch(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "etc", "fairlead", "policy.d") // two levels do not exist yet
	s, await := watch(t, dir, time.Hour)                      // only events count
	is := func(m NetCPU) func() bool { return func() bool { return netcpuOf(s) == m && s.Status().Err == nil } }
	await("the first load", func() bool { return !s.Status().LastLoad.IsZero() })

	testkit.Must(t, os.MkdirAll(dir, 0o755))
	write(t, dir+"/a.yaml", all("netcpu: isolate"))
	await("a directory that was made", is(NetCPUIsolate))

	write(t, dir+"/a.yaml", all("netcpu: auto"))
	await("a file that was written", is(NetCPUAuto))

	write(t, dir+"/.tmp", all("netcpu: charge"))
	testkit.Must(t, os.Rename(dir+"/.tmp", dir+"/a.yaml"))
	await("a file that was renamed", is(NetCPUCharge))

	write(t, dir+"/a.yaml", "")
	await("a file that was emptied", is(""))
	write(t, dir+"/a.yaml", all("netcpu: charge"))
	await("a file that was filled", is(NetCPUCharge))

	write(t, dir+"/b.yaml", "broken: 1\n")
	await("a broken file", func() bool { return s.Status().Err != nil })
	testkit.Same(t, "after a broken file", NetCPUCharge, netcpuOf(s))
	testkit.Must(t, os.Remove(dir+"/b.yaml"))
	await("that it was mended", is(NetCPUCharge))

	testkit.Must(t, os.Mkdir(dir+".new", 0o755))
	write(t, dir+".new/a.yaml", all("netcpu: isolate"))
	testkit.Must(t, os.Rename(dir, dir+".old"))
	testkit.Must(t, os.Rename(dir+".new", dir))
	await("a directory that was replaced", is(NetCPUIsolate))
	write(t, dir+"/a.yaml", all("netcpu: auto"))
	await("a file in the new directory", is(NetCPUAuto))

	testkit.Must(t, os.RemoveAll(dir))
	await("that the directory is gone", is(""))
	testkit.Must(t, os.Mkdir(dir, 0o755))
	write(t, dir+"/a.yaml", all("netcpu: charge"))
	await("that it is back", is(NetCPUCharge))
	testkit.Must(t, os.RemoveAll(filepath.Join(root, "etc")))
	await("that its parents are gone", is(""))
	testkit.Must(t, os.MkdirAll(dir, 0o755))
	write(t, dir+"/a.yaml", all("netcpu: isolate"))
	await("that they are back", is(NetCPUIsolate))
	testkit.Check(t, s.Status().WatchErr)
}

// TestWatchConfigMap swaps a symbolic link to the data, as the kubelet does.
func TestWatchConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(n int, text string) {
		t.Helper()
		data := fmt.Sprintf("..v%d", n)
		testkit.Must(t, os.Mkdir(filepath.Join(dir, data), 0o755))
		write(t, filepath.Join(dir, data, "a.yaml"), text)
		testkit.Must(t, os.Symlink(data, filepath.Join(dir, "..data_tmp")))
		testkit.Must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version(1, all("netcpu: auto"))
	testkit.Must(t, os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")))
	s, await := watch(t, dir, time.Hour)
	await("the first version", func() bool { return netcpuOf(s) == NetCPUAuto })
	version(2, all("netcpu: isolate"))
	await("the second version", func() bool { return netcpuOf(s) == NetCPUIsolate })
}

// TestWatchLinkedDirectory swaps the directory itself, which is a link.
func TestWatchLinkedDirectory(t *testing.T) {
	root := t.TempDir()
	for i, m := range []string{"auto", "isolate"} {
		d := filepath.Join(root, fmt.Sprint("release", i))
		testkit.Must(t, os.Mkdir(d, 0o755))
		write(t, d+"/a.yaml", all("netcpu: "+m))
	}
	dir := filepath.Join(root, "policy.d")
	testkit.Must(t, os.Symlink("release0", dir))
	s, await := watch(t, dir, time.Hour)
	await("the first release", func() bool { return netcpuOf(s) == NetCPUAuto })
	testkit.Must(t, os.Symlink("release1", dir+".tmp"))
	testkit.Must(t, os.Rename(dir+".tmp", dir))
	await("the second release", func() bool { return netcpuOf(s) == NetCPUIsolate })
	write(t, root+"/release1/a.yaml", all("netcpu: charge"))
	await("a file of the second release", func() bool { return netcpuOf(s) == NetCPUCharge })
}

// TestWatchPolls changes the target of a link elsewhere, without an event.
func TestWatchPolls(t *testing.T) {
	dir, elsewhere := t.TempDir(), filepath.Join(t.TempDir(), "x")
	write(t, elsewhere, all("netcpu: auto"))
	testkit.Must(t, os.Symlink(elsewhere, filepath.Join(dir, "a.yaml")))
	s, await := watch(t, dir, 50*time.Millisecond)
	await("the first state", func() bool { return netcpuOf(s) == NetCPUAuto })
	write(t, elsewhere, all("netcpu: isolate"))
	await("the change", func() bool { return netcpuOf(s) == NetCPUIsolate })
}

// TestWatchReportsNews: looking alone is no change, nor is a file that is rewritten with the same
// content.
func TestWatchReportsNews(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	write(t, file, all("netcpu: auto"))
	s := NewStore(dir, time.Now)
	s.poll = time.Millisecond
	calls := make(chan NetCPU, 100)
	stop := testkit.Background(t, func(ctx context.Context) error { return s.Watch(ctx, func() { calls <- netcpuOf(s) }) })
	first := <-calls
	for range 20 {
		write(t, file+".tmp", all("netcpu: auto"))
		testkit.Must(t, os.Rename(file+".tmp", file))
		time.Sleep(5 * time.Millisecond) // some looks, at whatever moment
	}
	write(t, file+".tmp", all("netcpu: isolate"))
	testkit.Must(t, os.Rename(file+".tmp", file))
	seen := []NetCPU{first}
	for seen[len(seen)-1] != NetCPUIsolate {
		seen = append(seen, <-calls)
	}
	time.Sleep(20 * time.Millisecond)
	stop()
	if len(calls) > 0 {
		t.Errorf("news of an unchanged directory: %q, and %d more", seen, len(calls))
	}
	for i := 1; i < len(seen); i++ {
		if seen[i] == seen[i-1] {
			t.Errorf("news of nothing: %q", seen)
		}
	}
}
