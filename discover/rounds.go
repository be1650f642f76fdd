package discover

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"golang.org/x/sys/unix"
)

// rounds converts reports to containers, repeatedly. It belongs to the goroutine that runs the Set.
// It looks up again only what may have changed.
type rounds struct {
	cfg    Config
	layout cgroup.Layout
	root   container.ID // the root of the v2 tree, which is no container
	wake   func()
	boot   time.Time
	nets   *networks

	procs   map[recordKey]*process
	live    map[container.ID]*entry
	settled bool // the last round left no work for the next
	awaits  bool // there are runtimes, and every source has listed: an unseen cgroup is new

	early map[string]int // first processes of created containers, by cgroup: see begun
}

// youth is how long an engine may take to report a container whose cgroup exists. Until then its
// network is incomplete and its labels are unknown, so any work for it would have to be done twice.
const youth = 10 * time.Second

var errYoung = errors.New("its engine is about to report it")

// expected reports whether an engine is about to report the container of a new cgroup. A user who
// may make cgroups can choose the name, but not the owner.
func expected(dir string) bool {
	var st unix.Stat_t
	return engineScope.MatchString(filepath.Base(dir)) && unix.Lstat(dir, &st) == nil && st.Uid == 0
}

// recordKey identifies a record of one source. A restarted container has a new PID, and so a new
// recordKey.
type recordKey struct {
	source    int
	runtimeID string
	pid       int
	cgroup    string
}

// claim is a record that represents a container in one round.
type claim struct {
	record  Record
	source  string
	process *process
}

// entry is one running container.
type entry struct {
	claim
	container container.Container
	look      int  // number of the look at its network that container is based on
	due       bool // examine it again in the next round
	afresh    bool // examine its network, too, without an event
	elsewhere bool // it belongs to another host
	bare      bool // its runtime has yet to set up its networks
}

func newRounds(cfg Config, layout cgroup.Layout, wake func()) (*rounds, error) {
	root, err := cgroup.ID(layout.V2)
	if err != nil {
		return nil, err
	}
	boot, err := bootTime(cfg.Now)
	if err != nil {
		return nil, err
	}
	nets, err := newNetworks(cfg, wake)
	if err != nil {
		return nil, err
	}
	return &rounds{
		cfg: cfg, layout: layout, root: container.ID(root), wake: wake, boot: boot, nets: nets,
		procs: make(map[recordKey]*process), live: make(map[container.ID]*entry),
	}, nil
}

func (r *rounds) close() {
	for _, p := range r.procs {
		p.close()
	}
	r.nets.close()
}

// run updates live from the reports. With full, it examines everything again. It returns the time
// until it must run again, or -1 if there is none.
func (r *rounds) run(reports []reported, full bool) time.Duration {
	now := r.cfg.Now()
	next := time.Duration(-1)
	soon := func(d time.Duration) {
		if next < 0 || d < next {
			next = max(d, 0)
		}
	}
	if r.begun(reports) {
		soon(begins)
	}
	claims := make(map[container.ID]claim)
	owned := make(map[string]bool) // v2 directories of runtimes' containers
	listed, runtimes := true, false
	for i, rep := range reports {
		bare := rep.status.Name == container.CgroupSource
		listed, runtimes = listed && rep.status.Listed, runtimes || !bare && !rep.status.Absent
		for _, rec := range rep.records {
			if bare && covered(owned, rec.CgroupV2, r.layout.V2) {
				continue
			}
			key := recordKey{i, rec.RuntimeID, rec.PID, rec.CgroupV2}
			p := r.procs[key]
			if p == nil && bare && r.awaits && expected(rec.CgroupV2) {
				p = &process{err: errYoung, retry: now.Add(youth)}
			} else if p == nil || stale(key, p, now) || full && r.moved(rec, p) {
				p = r.reopen(rec, p)
			}
			r.procs[key] = p
			p.claimed = true
			if p.err != nil && (key.pid == 0 || !errors.Is(p.err, fs.ErrNotExist)) {
				soon(p.retry.Sub(now))
			}
			if p.err != nil || p.gone() || p.id == r.root {
				continue
			}
			if _, taken := claims[p.id]; taken {
				continue
			}
			if !bare {
				owned[p.cgroup.V2] = true
				if rec.Sandbox {
					continue
				}
			}
			claims[p.id] = claim{rec, rep.status.Name, p}
		}
	}
	r.awaits = listed && runtimes
	for key, p := range r.procs {
		if !p.claimed {
			p.close()
			delete(r.procs, key)
		}
		p.claimed = false
	}

	budget := perRound
	r.settled = true
	for id, c := range claims {
		e := r.live[id]
		known := e != nil && e.process == c.process && e.source == c.source && reflect.DeepEqual(e.record, c.record)
		if known && !full && !e.due {
			wait, changed := r.nets.changed(e.container.NetNS, e.look)
			if !changed {
				continue
			}
			if wait > 0 && !e.bare {
				soon(wait)
				continue
			}
		}
		if budget == 0 {
			// The old state remains valid until then.
			r.settled = r.settled && known
			if known {
				e.due, e.afresh = true, e.afresh || full
			}
			soon(0)
			continue
		}
		budget--
		var got container.Container
		var look int
		err := r.cfg.Look(id, func() (err error) {
			got, look, err = r.describe(c.record, c.source, c.process, !known || full || e.afresh)
			return err
		})
		switch {
		case err == nil:
			addressed := len(slices.DeleteFunc(slices.Clone(got.Interfaces), func(i container.Interface) bool { return len(i.Addrs) == 0 }))
			bare := r.early[got.Cgroup.V2] != 0 && !got.HostNetwork && addressed < max(1, c.record.Networks)
			r.live[id] = &entry{claim: c, container: got, look: look, bare: bare}
			if net := r.nets.known[got.NetNS]; net != nil && known && e.bare && !bare {
				net.hold = minHold // those looks saw the runtime's own work
			}
			if wait, changed := r.nets.changed(got.NetNS, look); changed {
				soon(wait)
			}
		case c.process.ended():
			delete(claims, id)
		default:
			if !kernel.Gone(err) { // otherwise it is about to end
				r.cfg.Log.Warn("look at container", "name", c.record.Name, "source", c.source, "err", err)
			}
			r.fail(c.process, err)
			r.settled = false
			soon(c.process.retry.Sub(now))
			if known {
				// The old state remains valid until then.
				c.process.err, e.due, e.afresh = nil, true, e.afresh || full
				continue
			}
			delete(claims, id)
		}
	}
	used, inhabited := make(map[uint64]bool), make(map[uint64]bool)
	for id, e := range r.live {
		if _, ok := claims[id]; !ok {
			delete(r.live, id)
			continue
		}
		e.bare = e.bare && r.early[e.container.Cgroup.V2] != 0 // otherwise it runs without networks
		used[e.container.NetNS] = true
		if e.source != container.CgroupSource {
			inhabited[e.container.NetNS] = true
		}
	}
	for _, e := range r.live {
		e.elsewhere = e.source == container.CgroupSource && r.nets.elsewhere(e.container.NetNS, inhabited)
	}
	r.nets.keep(used)
	return next
}

// containers returns the running containers of this host.
func (r *rounds) containers() map[container.ID]container.Container {
	list := make(map[container.ID]container.Container, len(r.live))
	for id, e := range r.live {
		if !e.elsewhere && !e.bare {
			list[id] = e.container
		}
	}
	return list
}

// stale reports whether to open the process p of a record again: after a failure, at growing
// intervals; and for a record without PID once the process that represents its cgroup has ended.
// Finding no such process does not mean that the container has ended. While a runtime sets up a
// container, its processes follow one another and the cgroup stays populated, so no event announces
// the last of them.
func stale(key recordKey, p *process, now time.Time) bool {
	if p.err != nil && !errors.Is(p.err, fs.ErrNotExist) {
		return !now.Before(p.retry)
	}
	return key.pid == 0 && p.gone()
}

// moved reports whether a process has moved to other cgroups since it was opened, or its cgroup was
// renamed. The kernel reports neither.
func (r *rounds) moved(rec Record, p *process) bool {
	if p.err != nil || p.gone() {
		return false
	}
	paths, err := r.paths(rec, p.pid)
	return err != nil && !p.ended() || err == nil && paths != p.cgroup
}

// fail records that a process could not be examined, and schedules the next attempt.
func (r *rounds) fail(p *process, err error) {
	p.err = err
	p.failures = min(p.failures+1, 10)
	p.retry = r.cfg.Now().Add(firstRetry << p.failures)
}

// covered reports whether dir or a directory above it is in owned.
func covered(owned map[string]bool, dir, root string) bool {
	for len(dir) > len(root) {
		if owned[dir] {
			return true
		}
		dir = filepath.Dir(dir)
	}
	return false
}

// reopen is open for a new record (old is nil), or one with a stale process.
func (r *rounds) reopen(rec Record, old *process) *process {
	p := r.open(rec)
	if old != nil {
		old.close()
		if old.err != nil { // a process that lived and ended did not fail
			p.failures = old.failures
		}
	}
	if p.err != nil {
		r.fail(p, p.err)
	}
	return p
}

// open finds the process and the cgroups of a record. The result contains any error.
func (r *rounds) open(rec Record) *process {
	p, err := r.process(rec)
	if err != nil {
		return &process{err: err}
	}
	paths, err := r.paths(rec, p.pid)
	if err != nil {
		p.err = err
		return p
	}
	id, err := cgroup.ID(paths.V2)
	p.cgroup, p.id, p.err = paths, container.ID(id), err
	return p
}

// process opens the process of a record. A record with only a directory gets the oldest process in it.
func (r *rounds) process(rec Record) (*process, error) {
	pid := rec.PID
	if pid <= 0 {
		dir := rec.CgroupV2
		if !strings.HasPrefix(dir, r.layout.V2+"/") || filepath.Clean(dir) != dir {
			return nil, fmt.Errorf("cgroup %q is not below %s", dir, r.layout.V2)
		}
		var err error
		if pid, err = oldest(r.cfg.Proc, dir, r.nets.own.Inode()); err != nil {
			return nil, err
		}
	}
	p, err := openProcess(r.cfg.Proc, pid, r.boot, r.wake)
	if err == nil && rec.Start != 0 && rec.Start != p.start {
		p.close()
		return nil, fmt.Errorf("process %d is another one: %w", pid, fs.ErrNotExist)
	}
	return p, err
}

// known returns the runtimes' records with live processes, by source. It does not add pods.
func (r *rounds) known(reports []reported) *Known {
	known := Known{Records: make(map[string][]Record), Pods: make(map[string][]Pod)}
	for i, rep := range reports {
		for _, rec := range rep.records {
			if p := r.procs[recordKey{i, rec.RuntimeID, rec.PID, rec.CgroupV2}]; p != nil && rec.PID > 0 && !p.gone() {
				rec.Start = p.start
				known.Records[rep.status.Name] = append(known.Records[rep.status.Name], rec)
			}
		}
	}
	return &known
}

// paths returns the cgroups of a record with process pid.
func (r *rounds) paths(rec Record, pid int) (cgroup.Paths, error) {
	paths, err := r.layout.OfPID(r.cfg.Proc, pid)
	if err != nil {
		return paths, err
	}
	cut := func(dir string) string { return ofRuntime(dir, rec.RuntimeID) }
	if rec.PID <= 0 {
		sub, ok := strings.CutPrefix(paths.V2, rec.CgroupV2)
		if !ok || sub != "" && sub[0] != '/' {
			return paths, fmt.Errorf("process %d has left cgroup %s: %w", pid, rec.CgroupV2, fs.ErrNotExist)
		}
		// The process may be in a child cgroup; the record's directory is the container.
		cut = func(dir string) string { return strings.TrimSuffix(dir, sub) }
	}
	for _, dir := range []*string{&paths.V2, &paths.CPU, &paths.CPUSet, &paths.IO} {
		*dir = cut(*dir)
	}
	return paths, nil
}

// ofRuntime cuts a cgroup path after the element with the runtime's id. Init systems in containers,
// and some runtimes, move the first process into a cgroup below the container's.
func ofRuntime(dir, id string) string {
	if id == "" {
		return dir
	}
	end := 0
	for elem := range strings.SplitSeq(dir, "/") {
		end += len(elem)
		// A short id may be a plain word, so it must be the whole name.
		if elem == id || len(id) >= 12 && strings.Contains(elem, id) {
			return dir[:end]
		}
		end++
	}
	return dir
}

// describe combines everything that is known about a container.
func (r *rounds) describe(rec Record, source string, p *process, afresh bool) (container.Container, int, error) {
	ns, err := netdev.InodeOf(r.cfg.Proc, p.pid)
	if err != nil {
		return container.Container{}, 0, err
	}
	net, err := r.nets.of(ns, p.pid, afresh)
	if err != nil {
		return container.Container{}, 0, err
	}
	if net == nil {
		net = new(network) // the agent's own namespace
	}
	if p.ended() {
		// All of the above may belong to another process.
		return container.Container{}, 0, fs.ErrNotExist
	}
	name := cmp.Or(rec.Name, filepath.Base(p.cgroup.V2))
	if rec.Pod != "" {
		name = rec.Namespace + "/" + rec.Pod + "/" + name
	}
	return container.Container{
		ID:          p.id,
		Name:        name,
		Source:      source,
		RuntimeID:   rec.RuntimeID,
		Image:       rec.Image,
		Labels:      rec.Labels,
		Annotations: rec.Annotations,
		LeftOut:     rec.LeftOut,
		Pod:         rec.Pod,
		Namespace:   rec.Namespace,
		ImageLabels: rec.ImageLabels,
		ImageNames:  rec.ImageNames,
		Requests:    rec.Requests,
		PodRequests: rec.PodRequests,
		PodCgroup:   rec.PodCgroup != "" && inPod(container.Cgroup(p.cgroup), rec.PodCgroup),
		PID:         p.pid,
		Started:     p.started,
		Cgroup:      container.Cgroup(p.cgroup),
		NetNS:       ns,
		HostNetwork: ns == r.nets.own.Inode(),
		Interfaces:  net.interfaces,
		Many:        net.many,
	}, net.looks, nil
}

// inPod reports whether the directories are children of the pod's.
func inPod(c container.Cgroup, pod string) bool {
	for _, dir := range []string{c.V2, c.CPU} {
		if dir != "" && filepath.Base(filepath.Dir(dir)) != pod {
			return false
		}
	}
	return c.CPU != ""
}
