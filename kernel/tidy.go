package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// Tidy removes the cgroups that containers left behind because a kernel thread of ours was in them
// when they ended: a runtime gives up on a cgroup that is not empty, runc within a fifth of a
// second. This happens to containers that end while no agent runs, or while it is busy. out lists
// the threads that have been moved since. A cgroup in use stays.
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

// Reclaim makes the lost entries anew of what carries fairlead's mark in the network namespace of this
// process: root qdiscs and IFBs, for the feature that makes them, which keeps what it still wants. The
// caller must know that no agent works there.
func Reclaim(r Roots, j *journal.Journal, feature string) error {
	ns, err := netdev.Open(filepath.Join(r.Proc, "self/ns/net"))
	if err != nil {
		return fmt.Errorf("look for what a lost journal had: %w", err)
	}
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	errs := []error{err}
	marks := []string{netdev.OurIFB, qdisc.Ours(qdisc.KindHTB), qdisc.Ours(qdisc.KindHFSC)}
	have, named := make(map[journal.Ref]bool), make(map[string]bool)
	for _, e := range j.Entries() {
		have[e.Ref] = true
	}
	for _, l := range links {
		named[l.Name] = true
	}
	for _, l := range links {
		var knobs []journal.Knob
		for _, sum := range []bool{false, true} { // before the root that leads there, which goes first
			if named[netdev.IFBName(l.Index, sum)] {
				knobs = append(knobs, ns.IFB(l.Index, sum))
			}
		}
		for _, k := range append(knobs, qdisc.Root(ns, l.Index)) {
			value, err := k.Read()
			if err == nil && !have[k.Ref()] && slices.Contains(marks, value) {
				errs = append(errs, j.Turn(k, value, journal.Owner{Feature: feature}))
			}
		}
	}
	return errors.Join(errs...)
}

// ofRuntime matches the name of a cgroup that a runtime makes for a container, and removes with it.
// Others may be kept, empty, for the next process.
var ofRuntime = regexp.MustCompile(`[0-9a-f]{64}`)

// abandoned returns the cgroups that a thread of ours may have kept from being removed: the one that
// it was put into, and on v2, where that is a child that we made, the container's. There are none if
// the container is known to live.
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
