package discover

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

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

const (
	treeDepth  = 12
	treeSize   = 8192 // cgroups
	treeOthers = 256  // cgroups that do not belong to root
	treeEvents = 64   // events of those, handled between two walks
	treeSteps  = 8192 // steps of work on changing cgroups between two walks: one per change and per visit
	treeWrites = 256  // writes to the files of one cgroup between two walks
	treeRelist = 30 * time.Second
	treeBlind  = 5 * time.Second // between walks where inotify does not work
	treeSettle = 5 * time.Millisecond
)

// CgroupTree is the source that needs no runtime. It walks the cgroup v2 tree below root
// (cgroup.DefaultRoot if empty), and reports every systemd scope, and every cgroup with a process
// in another network namespace than the agent's.
//
// It sees changes at once, by inotify, but a user with a cgroup subtree may make and remove
// thousands per second. After 8192 steps of work within 30 s, it walks the tree every 5 s instead,
// for 30 s, and its reports are partial until it can follow again. It follows up to 256 writes in
// 30 s to the files of one cgroup, because the kernel writes them without end when memory is short.
// Beyond that, it looks at this cgroup every 5 s.
func CgroupTree(proc, root string) Source {
	return &tree{proc: proc, root: root, most: treeSteps, relist: treeRelist, blindly: treeBlind}
}

type tree struct {
	proc, root      string
	most            int           // steps between two walks
	relist, blindly time.Duration // between walks, with inotify and without

	top   string            // the v2 tree
	host  uint64            // the agent's network namespace
	watch *fsnotify.Watcher // nil if the host has no inotify instances left
	nodes map[string]*node
	due   map[string]*node // nodes to visit
	blind bool             // a directory is not watched

	others  int  // nodes that do not belong to root
	events  int  // events of those since the last walk
	steps   int  // work on changes since the last walk
	over    bool // cgroups were omitted since the last walk
	flooded bool // there were too many changes to watch since the walk before the last
	changed bool // the list differs from the published one
}

// node is one cgroup directory.
type node struct {
	counts bool          // it is a container
	change bool          // an event reported its creation, not a walk
	writes int           // to its files since the last walk
	deaf   bool          // there were too many writes to watch
	other  bool          // not root's: its owner may make any number
	next   time.Time     // time of the next visit; zero if only after an event
	pause  time.Duration // pause after that visit
}

func (t *tree) Name() string { return container.CgroupSource }

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
	retry(ctx, minBackOff, maxBackOff, func(ctx context.Context) {
		if err := t.session(ctx, publish); err != nil && ctx.Err() == nil {
			publish(Report{Err: err})
		}
	})
	return nil
}

// session watches the tree from scratch.
func (t *tree) session(ctx context.Context, publish func(Report)) error {
	t.nodes, t.due = make(map[string]*node), make(map[string]*node)
	t.others, t.blind, t.changed = 0, false, true
	var happened chan fsnotify.Event
	var failed chan error
	// inotify instances are few, and other programs use them, too. Without one, periodic walks have
	// to do.
	if t.watch, _ = fsnotify.NewBufferedWatcher(1024); t.watch != nil {
		defer t.stopWatch()
		happened, failed = t.watch.Events, t.watch.Errors
	}

	relist := time.NewTimer(0)
	defer relist.Stop()
	soon := time.NewTimer(time.Hour)
	defer soon.Stop()
	pending := false // soon is about to fire
	partial := false // the published report was partial
	first := true    // there has been no walk yet
	var calm <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-calm:
			return nil // the next session watches again
		case ev, ok := <-happened:
			if !ok {
				return errors.New("watch cgroups: ended")
			}
			t.event(ev)
			if t.steps > t.most {
				// The kernel reports nothing from here on.
				t.stopWatch()
				happened, failed = nil, nil
				t.flooded, t.blind = true, true
				relist.Reset(t.blindly)
				calm = time.After(t.relist)
			}
			// Handle all events of one moment together.
			if !pending {
				soon.Reset(treeSettle)
				pending = true
			}
			continue
		case err := <-failed:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("watch cgroups: %w", err)
			}
			relist.Reset(0)
		case <-soon.C:
			pending = false
		case <-relist.C:
			t.flooded = t.flooded && (first || t.watch == nil)
			t.walk()
			first = false
			relist.Reset(t.relist)
			if t.blind {
				relist.Reset(t.blindly)
			}
		}
		if wait := t.look(time.Now()); wait >= 0 {
			soon.Reset(max(wait, treeSettle))
			pending = true
		}
		if now := t.over || t.flooded; t.changed || now != partial {
			publish(Report{Records: t.records(), Partial: now})
			t.changed, partial = false, now
		}
	}
}

func (t *tree) stopWatch() {
	if t.watch != nil {
		t.watch.Close()
		t.watch = nil
	}
}

// event handles an event.
func (t *tree) event(ev fsnotify.Event) {
	switch {
	case ev.Has(fsnotify.Create):
		t.steps++
		t.add(ev.Name, true)
	case ev.Has(fsnotify.Remove), ev.Has(fsnotify.Rename):
		t.steps++
		t.forget(ev.Name)
	default:
		dir := ev.Name
		if t.nodes[dir] == nil {
			dir = filepath.Dir(dir)
		}
		n := t.nodes[dir]
		if n == nil || n.deaf {
			return
		}
		if n.writes++; n.writes > treeWrites {
			n.deaf = true
			if t.watch != nil {
				t.watch.Remove(dir)
			}
			n.next = time.Now().Add(t.blindly)
			t.due[dir] = n
			return
		}
		// cgroup.events reports that the first process came or the last one went. A write to
		// cgroup.procs moves a process.
		switch filepath.Base(ev.Name) {
		case "cgroup.events", "cgroup.procs":
			t.lookSoon(dir, n)
		}
	}
}

// lookSoon makes look visit a cgroup soon, and a few times after that: a runtime moves a process in
// before it gives it its namespaces.
func (t *tree) lookSoon(dir string, n *node) {
	n.next, n.pause = time.Now().Add(treeSettle), 2*treeSettle
	t.due[dir] = n
}

// walk makes nodes match the existing directories.
func (t *tree) walk() {
	t.over, t.events, t.steps = false, 0, 0
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
		if n.deaf {
			t.listen(dir)
		}
		n.writes, n.deaf = 0, false
		n.next = time.Now()
		t.due[dir] = n
		switch {
		case t.depth(dir) >= treeDepth:
		case n.other && t.others >= treeOthers: // no room for its contents
			t.over = true
		default:
			below, _ := cgroup.Children(dir, treeSize)
			queue = append(queue, below...)
		}
	}
}

func (t *tree) depth(dir string) int {
	return strings.Count(strings.TrimPrefix(dir, t.top), "/")
}

// add adds a new directory with its contents, and reports whether it is now in nodes. On events it
// adds only a few directories that do not belong to root, as a user can make thousands per second.
// The next walk adds the others.
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
	if n.change = event; event {
		t.steps++
	}
	t.nodes[dir] = n
	t.lookSoon(dir, n)
	t.listen(dir)
	// Directories may have been made before the watch existed.
	below, _ := cgroup.Children(dir, treeSize)
	for _, sub := range below {
		t.add(sub, event)
	}
	return true
}

func (t *tree) listen(dir string) {
	if t.watch == nil {
		t.blind = true
	} else if err := t.watch.Add(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.blind = true
	}
}

// forget drops a node, if there is one.
func (t *tree) forget(dir string) {
	if n := t.nodes[dir]; n != nil {
		t.changed = t.changed || n.counts
		if n.other {
			t.others--
		}
	}
	delete(t.nodes, dir)
	delete(t.due, dir)
}

// look visits the nodes that are due. It returns the time until the next is due; -1 for none.
func (t *tree) look(now time.Time) (wait time.Duration) {
	wait = -1
	for dir, n := range t.due {
		if !now.Before(n.next) {
			if n.change {
				t.steps++
			}
			counts, err := t.counts(dir)
			if errors.Is(err, fs.ErrNotExist) {
				t.forget(dir)
				continue
			}
			t.changed = t.changed || counts != n.counts
			n.counts = counts
			if n.deaf {
				n.next, n.pause = now.Add(t.blindly), 0
			} else if n.pause == 0 || n.pause >= 2*time.Second {
				delete(t.due, dir)
				continue
			} else {
				n.next, n.pause = now.Add(n.pause), 3*n.pause
			}
		}
		if wait < 0 || n.next.Sub(now) < wait {
			wait = max(n.next.Sub(now), 0)
		}
	}
	return wait
}

// counts reports whether a cgroup is a container itself.
func (t *tree) counts(dir string) (bool, error) {
	if dir == t.top || !t.nodes[dir].other && engineMonitor.MatchString(filepath.Base(dir)) {
		return false, nil
	}
	if strings.HasSuffix(dir, ".scope") && filepath.Base(dir) != "init.scope" {
		b, err := readSmall(filepath.Join(dir, "cgroup.events"))
		return strings.Contains(string(b), "populated 1"), err
	}
	pids, err := cgroup.Procs(dir, maxProcs)
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

// records lists the containers. If one container's cgroup is below another's, only the upper counts.
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
