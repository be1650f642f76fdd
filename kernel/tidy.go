package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Tidy removes the cgroups that containers left behind because one of our kernel threads was in
// them when they ended. A runtime gives up on a cgroup that is not empty; runc does so within 200
// ms. This happens to containers that end while no agent runs, or while it is busy. out lists the
// threads that were moved since. A cgroup in use stays.
func Tidy(r Roots, out []journal.Outcome) error {
	var layout cgroup.Layout
	var errs []error
	for _, o := range out {
		if o.Entry.Ref.Kind != sched.KindKthread || o.Err != nil {
			continue
		}
		if layout.Mode == "" {
			var err error
			if layout, err = cgroup.Detect(r.Proc, r.Cgroup); err != nil {
				return err
			}
		}
		for _, dir := range abandoned(layout, o.Entry) {
			// The kernel refuses to remove a cgroup that is not empty.
			err := unix.Rmdir(dir)
			if err != nil && err != unix.EBUSY && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return errors.Join(errs...)
}

// lost is a knob that an earlier agent turned, and whose entry was lost.
type lost struct {
	journal.Knob
	before string // the most likely value; the real one is unknown
}

// Unmarked tells the journal that the current value is ours.
func (l lost) Unmarked(string) (before string, ours bool) { return l.before, true }

// Reclaim recreates the lost entries of objects that carry fairlead's mark in this process's
// network namespace. For feature shaper these are root qdiscs, their sysctl, IFBs and filters; for
// poller, the threads that poll for all containers, with their group and devices. Both keep what
// they still want. The caller ensures that no other agent works there.
func Reclaim(r Roots, j *journal.Journal, shaper, poller string) error {
	ns, err := netdev.Open(filepath.Join(r.Proc, "self/ns/net"))
	if err != nil {
		return fmt.Errorf("look for what a lost journal had: %w", err)
	}
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	errs := []error{err}
	named := make(map[string]bool)
	for _, l := range links {
		named[l.Name] = true
	}
	reclaim := func(feature string, k journal.Knob, before string, marks ...string) bool {
		value, err := k.Read()
		if err != nil || !slices.Contains(marks, value) || len(j.Claims(k.Ref())) > 0 {
			return false
		}
		errs = append(errs, j.Turn(lost{k, before}, value, journal.Owner{Feature: feature}))
		return true
	}
	shaped := false
	for _, l := range links {
		for _, sum := range []bool{false, true} { // before the root that redirects to it, because the root goes first
			if named[netdev.IFBName(l.Index, sum)] {
				reclaim(shaper, ns.IFB(l.Index, sum), netdev.NoDevice, netdev.OurIFB)
			}
		}
		root := reclaim(shaper, qdisc.Root(ns, l.Index), qdisc.Default, qdisc.Ours(qdisc.KindHTB), qdisc.Ours(qdisc.KindHFSC))
		shaped = shaped || root
		filters, _ := qdisc.Marked(ns, l.Index) // as above: what cannot be read stays
		for k, before := range filters {
			if value, err := k.Read(); err == nil {
				reclaim(shaper, k, before, value)
			}
		}
	}
	if shaped { // some root was
		reclaim(shaper, qdisc.ForwardPriority(r.Proc, ns), "1", "0")
	}
	layout, err := cgroup.Detect(r.Proc, r.Cgroup)
	napis, nerr := ns.NAPIs(0)
	if err != nil || nerr != nil { // no groups, or threads are unknown (before 6.7)
		return errors.Join(errs...)
	}
	group := UplinkGroup(layout, ns.Inode())
	reclaim(poller, cgroup.Group(group), cgroup.Absent, cgroup.Present)
	for _, n := range napis {
		t, err := sched.Find(r.Proc, n.Thread)
		if err != nil {
			continue // a softirq polls
		}
		k := sched.Group(r.Proc, layout, t, layout.CPU)
		if at, err := k.Read(); err == nil && at == group {
			reclaim(poller, ns.Threaded(n.Device), "0", "1")
			reclaim(poller, k, layout.CPU, group)
		}
	}
	return errors.Join(errs...)
}

// UplinkGroup is the cgroup of the threads that poll for all containers in a network namespace.
// Several agents may run on one machine, each in another namespace.
func UplinkGroup(l cgroup.Layout, netns uint64) string {
	return filepath.Join(l.CPU, "fairlead-uplink-"+strconv.FormatUint(netns, 10))
}

// ofRuntime matches the name of a cgroup that a runtime makes for a container and removes with it.
// Other cgroups may be kept, empty, for the next process.
var ofRuntime = regexp.MustCompile(`[0-9a-f]{64}`)

// abandoned returns the cgroups that one of our threads may have kept from removal: the cgroup that
// the thread was put into, and on v2, where that is a child that we made, the container's. It
// returns none if the container is known to be alive.
func abandoned(l cgroup.Layout, e journal.Entry) []string {
	if filepath.Clean(e.Wrote) != e.Wrote {
		return nil
	}
	for _, top := range []string{l.V2, l.CPU, l.CPUSet} {
		rest, below := strings.CutPrefix(e.Wrote, top+"/")
		if top == "" || !below {
			continue
		}
		if top != l.V2 { // v1: the container lives as long as its v2 cgroup
			if _, err := os.Lstat(filepath.Join(l.V2, rest)); !errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return []string{e.Wrote}
		}
		dir := filepath.Dir(e.Wrote)
		runtimes := ofRuntime.MatchString(filepath.Base(dir))
		switch id, err := cgroup.ID(dir); {
		case runtimes && (e.Owner.Container == 0 || err == nil && id == e.Owner.Container):
			return []string{e.Wrote, dir}
		case e.Owner.Container == 0: // a thread that serves the whole host: its entry has no container
			return []string{e.Wrote}
		}
		return nil // a new cgroup may have taken the name since
	}
	return nil
}
