package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/safchain/ethtool"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// state is what fairlead might change on a host, by name.
type state map[string]string

// readDevices adds the devices of a network namespace, labelled name: their offloads, whether and
// by how many threads they are polled, where they hand packets on to, and the programs at their tcx
// hooks, but for those that the accounts of CPU time attach in their windows.
func (s state) readDevices(t *testing.T, name, path string) {
	t.Helper()
	ns, err := netdev.Open(path)
	must(t, err)
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	must(t, err)
	for _, l := range links {
		if l.Name == "lo" {
			continue
		}
		prefix := name + " " + l.Name + " "
		err := ns.Do(func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			all, err := e.Features(l.Name)
			if err != nil {
				return err
			}
			s[prefix+"offloads"] = strings.Join(on(all), ",")
			for hook, at := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
				found, err := link.QueryPrograms(link.QueryOptions{Target: l.Index, Attach: at})
				if err != nil {
					return err
				}
				n, err := lasting(found.Programs)
				if err != nil {
					return err
				}
				s[prefix+hook] = fmt.Sprintf("%d programs", n)
			}
			return nil
		})
		if errors.Is(err, unix.ENODEV) { // it has just gone
			continue
		}
		must(t, err)
		threaded, err := ns.Threaded(l.Index).Read()
		if err != nil {
			threaded = "none" // it has no NAPI
		}
		s[prefix+"threaded"] = threaded
		for q := range l.RxQueues {
			rps, err := ns.RPS(l.Index, q).Read()
			if errors.Is(err, journal.ErrGone) {
				break // a queue that is there but not in use
			}
			must(t, err)
			s[fmt.Sprintf("%srps %d", prefix, q)] = rps
		}
		napis, err := ns.NAPIs(l.Index)
		must(t, err)
		threads := 0
		for _, n := range napis {
			if n.Thread != 0 {
				threads++
			}
		}
		s[prefix+"napis"] = fmt.Sprintf("%d, %d threads", len(napis), threads)
	}
}

func on(features map[string]bool) []string {
	return slices.Sorted(func(yield func(string) bool) {
		for f, is := range features {
			if is && !yield(f) {
				return
			}
		}
	})
}

// limits are the files of a cgroup that divide the CPU.
var limits = []string{"cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.weight", "cpu.max", "cpuset.cpus", "cgroup.subtree_control"}

// readCgroups adds, for each of the paths and in each hierarchy, the directories below, with their
// limits and the kernel threads in them.
func (s state) readCgroups(t *testing.T, paths ...string) {
	t.Helper()
	for _, top := range hierarchies() {
		for _, path := range paths {
			err := filepath.WalkDir(filepath.Join(top, path), func(dir string, d fs.DirEntry, err error) error {
				if err != nil || !d.IsDir() {
					return nil // absent, or about to be removed
				}
				s.readCgroup(dir)
				return nil
			})
			must(t, err)
		}
	}
}

func (s state) readCgroup(dir string) {
	s["cgroup "+dir] = "is there"
	for _, name := range limits {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
			s["cgroup "+dir+" "+name] = strings.TrimSpace(string(data))
		}
	}
}

// hierarchies are where cgroup trees are mounted.
func hierarchies() []string {
	dirs := []string{"/sys/fs/cgroup"}
	entries, _ := os.ReadDir(dirs[0])
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		return dirs
	}
	dirs = nil
	for _, e := range entries {
		if e.IsDir() { // the others are links to them
			dirs = append(dirs, filepath.Join("/sys/fs/cgroup", e.Name()))
		}
	}
	return dirs
}

// uplinkGroup names the cgroup of the threads that poll for all containers in the network namespace
// with this inode.
func uplinkGroup(inode uint64) string { return fmt.Sprintf("fairlead-uplink-%d", inode) }

// uplinkGroups returns the directories of all such cgroups.
func uplinkGroups(inode uint64) (found []string) {
	for _, top := range hierarchies() {
		dirs, _ := filepath.Glob(filepath.Join(top, uplinkGroup(inode)))
		found = append(found, dirs...)
	}
	return found
}

// diff returns the differences from before, one per line; nil for none.
func (s state) diff(before state) error {
	var all []error
	keys := maps.Clone(s)
	maps.Copy(keys, before)
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		if s[k] != before[k] {
			all = append(all, fmt.Errorf("%s: %q, was %q", k, s[k], before[k]))
		}
	}
	return errors.Join(all...)
}

// lasting counts the programs that do not come and go with the windows of the accounts.
func lasting(programs []link.AttachedProgram) (n int, err error) {
	for _, at := range programs {
		p, err := ebpf.NewProgramFromID(at.ID)
		if errors.Is(err, os.ErrNotExist) {
			continue // it has just gone
		}
		if err != nil {
			return 0, err
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			return 0, err
		}
		if info.Name != "fl_stamp" {
			n++
		}
	}
	return n, nil
}
