package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	treeDepth  = 12
	treeSize   = 8192 // cgroups
	treeOthers = 256  // of them such as do not belong to root
	treeEvents = 64   // of those that are taken up between two walks
	treeRelist = 30 * time.Second
	treeBlind  = 5 * time.Second // between lists where inotify does not work
)

// CgroupTree is the source that needs no runtime: it walks the cgroup v2 tree
// below root (cgroup.DefaultRoot if empty) and reports every systemd scope,
// and every cgroup with a process that has a network namespace of its own.
func CgroupTree(proc, root string) Source {
	return &tree{proc: proc, root: root}
}

type tree struct {
	proc, root string

	top   string            // the v2 tree
	host  uint64            // our network namespace
	watch *fsnotify.Watcher // nil if the host has no more of them
	nodes map[string]*node
	blind bool // there is a directory that is not watched

	others int  // nodes that do not belong to root
	events int  // how many of those were taken up since the last walk
	over   bool // cgroups were left out since then
}

// node is one cgroup directory.
type node struct {
	counts bool          // as a container
	other  bool          // does not belong to root: a user makes as many as he likes
	next   time.Time     // when to look again; zero if only after an event
	pause  time.Duration // until the look after that
}

func (t *tree) Name() string { return CgroupSource }

func (t *tree) Run(ctx context.Context, publish func(Report)) error {
	layout, err := cgroup.Detect(t.proc, t.root)
	if err != nil {
		return err
	}
	if t.top = layout.V2; t.top == "" {
		return fmt.Errorf("watch cgroups: %w", cgroup.ErrNone)
	}
	if t.host, err = netdev.InodeOf(t.proc, os.Getpid()); err != nil {
		return err
	}
	retry(ctx, func(ctx context.Context) {
		if err := t.session(ctx, publish); err != nil && ctx.Err() == nil {
			publish(Report{Err: err})
		}
	})
	return nil
}

// session watches the tree from scratch.
func (t *tree) session(ctx context.Context, publish func(Report)) error {
	t.nodes, t.others, t.blind = make(map[string]*node), 0, false
	var happened chan fsnotify.Event
	var failed chan error
	// inotify instances are few, and other programs use them too. Without one,
	// lists have to suffice.
	if t.watch, _ = fsnotify.NewBufferedWatcher(1024); t.watch != nil {
		defer t.watch.Close()
		happened, failed = t.watch.Events, t.watch.Errors
	}

	relist := time.NewTimer(0)
	defer relist.Stop()
	soon := time.NewTimer(time.Hour)
	defer soon.Stop()
	for {
		changed, over := false, t.over
		select {
		case <-ctx.Done():
			return nil
		case ev, ok := <-happened:
			if !ok {
				return errors.New("watch cgroups: ended")
			}
			changed = t.event(ev)
		case err := <-failed:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("watch cgroups: %w", err)
			}
			relist.Reset(0)
		case <-soon.C:
		case <-relist.C:
			t.walk()
			changed = true
			relist.Reset(treeRelist)
			if t.blind {
				relist.Reset(treeBlind)
			}
		}
		looked, wait := t.look(time.Now())
		if wait >= 0 {
			soon.Reset(wait)
		}
		if changed || looked || t.over != over {
			publish(Report{Records: t.records(), Partial: t.over})
		}
	}
}

// event says whether the event changes the list.
func (t *tree) event(ev fsnotify.Event) bool {
	switch {
	case ev.Has(fsnotify.Create):
		t.add(ev.Name, true)
	case ev.Has(fsnotify.Remove), ev.Has(fsnotify.Rename):
		n := t.nodes[ev.Name]
		t.forget(ev.Name)
		return n != nil && n.counts
	case ev.Has(fsnotify.Write):
		// cgroup.events reports that the first process came or the last one went;
		// a write to cgroup.procs moves a process.
		switch filepath.Base(ev.Name) {
		case "cgroup.events", "cgroup.procs":
			if n := t.nodes[filepath.Dir(ev.Name)]; n != nil {
				n.lookSoon()
			}
		}
	}
	return false
}

// lookSoon makes look visit a cgroup now, and a few times after that: a runtime
// first puts a process in, and then gives it its namespaces.
func (n *node) lookSoon() {
	n.next, n.pause = time.Now().Add(5*time.Millisecond), 20*time.Millisecond
}

// walk makes nodes match the directories that exist.
func (t *tree) walk() {
	t.over, t.events = false, 0
	for dir := range t.nodes {
		if _, err := os.Lstat(dir); err != nil {
			t.forget(dir)
		}
	}
	queue := []string{t.top}
	for len(queue) > 0 {
		dir := queue[0]
		queue = queue[1:]
		if !t.add(dir, false) {
			continue
		}
		n := t.nodes[dir]
		n.next = time.Now()
		switch {
		case t.depth(dir) >= treeDepth:
		case n.other && t.others >= treeOthers: // there is no room for what is in there
			t.over = true
		default:
			queue = append(queue, subdirs(dir, treeSize)...)
		}
	}
}

func (t *tree) depth(dir string) int {
	return strings.Count(strings.TrimPrefix(dir, t.top), "/")
}

// add takes up a directory that was not known, and what is in it, and says whether
// it is known now. On events it takes up a few directories that do not belong to
// root: the thousand that a user makes in a second are left to the next walk.
func (t *tree) add(dir string, event bool) bool {
	if t.nodes[dir] != nil {
		return true
	}
	var st unix.Stat_t
	if t.depth(dir) > treeDepth || unix.Lstat(dir, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return false
	}
	n := &node{other: st.Uid != 0}
	if len(t.nodes) >= treeSize || n.other && (t.others >= treeOthers || event && t.events >= treeEvents) {
		t.over = true
		return false
	}
	if n.other {
		t.others++
	}
	if n.other && event {
		t.events++
	}
	n.lookSoon()
	t.nodes[dir] = n
	if t.watch == nil {
		t.blind = true
	} else if err := t.watch.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.blind = true
	}
	// Directories that were made before the watch existed.
	for _, sub := range subdirs(dir, treeSize) {
		t.add(sub, event)
	}
	return true
}

// forget drops a node, if there is one.
func (t *tree) forget(dir string) {
	if n := t.nodes[dir]; n != nil && n.other {
		t.others--
	}
	delete(t.nodes, dir)
}

// look visits the nodes that are due. It says whether the list has changed,
// and when the next one is due, -1 for none.
func (t *tree) look(now time.Time) (changed bool, wait time.Duration) {
	wait = -1
	for dir, n := range t.nodes {
		if n.next.IsZero() {
			continue
		}
		if !now.Before(n.next) {
			counts, err := t.counts(dir)
			if errors.Is(err, fs.ErrNotExist) {
				changed = changed || n.counts
				t.forget(dir)
				continue
			}
			changed = changed || counts != n.counts
			n.counts = counts
			n.next = time.Time{}
			if n.pause > 0 && n.pause < 2*time.Second {
				n.next, n.pause = now.Add(n.pause), 4*n.pause
			}
		}
		if !n.next.IsZero() && (wait < 0 || n.next.Sub(now) < wait) {
			wait = max(n.next.Sub(now), 0)
		}
	}
	return changed, wait
}

// counts says whether a cgroup is a container of its own.
func (t *tree) counts(dir string) (bool, error) {
	if dir == t.top {
		return false, nil
	}
	if strings.HasSuffix(dir, ".scope") && filepath.Base(dir) != "init.scope" {
		b, err := readSmall(filepath.Join(dir, "cgroup.events"))
		return strings.Contains(string(b), "populated 1"), err
	}
	pids, err := procsIn(dir)
	if err != nil {
		return false, err
	}
	for _, pid := range pids {
		if ns, err := netdev.InodeOf(t.proc, pid); err == nil && ns != t.host {
			return true, nil
		}
	}
	return false, nil
}

// records lists the containers. Of a container below another one, the upper
// counts.
func (t *tree) records() []Record {
	found := make(map[string]bool)
	for dir, n := range t.nodes {
		if n.counts {
			found[dir] = true
		}
	}
	var list []Record
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		if !covered(found, filepath.Dir(dir), t.top) {
			list = append(list, Record{CgroupV2: dir, Name: filepath.Base(dir)})
		}
	}
	return list
}
