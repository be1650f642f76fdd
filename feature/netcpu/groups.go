package netcpu

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// knownGroup is one cgroup of a container as Apply last found it. The ID tells a renamed cgroup,
// which cgroup v1 allows, from a different one that the container was moved to. A renamed cgroup
// still has our limits and our changes, which have to be undone there.
type knownGroup struct {
	dir string
	id  uint64
}

// locate updates the known cgroups of a container. It moves the changes of a renamed cgroup to its
// new name.
func (n *Netcpu) locate(c container.Container) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, dir := range []string{c.Cgroup.CPU, c.Cgroup.CPUSet} {
		was := n.groups[c.ID][i]
		if dir == was.dir {
			continue
		}
		now := knownGroup{dir: dir}
		if dir != "" {
			id, err := cgroup.ID(dir)
			if errors.Is(err, fs.ErrNotExist) {
				continue // the container is about to be forgotten
			}
			if err != nil {
				return err
			}
			now.id = id
		}
		if was.dir != "" && now.id == was.id {
			if err := n.renamed(was.dir, now.dir); err != nil {
				return err
			}
		}
		at := n.groups[c.ID]
		at[i] = now
		n.groups[c.ID] = at
	}
	return nil
}

// renamed moves the changes of a cgroup, and of threads that were moved into it, to its new name.
func (n *Netcpu) renamed(was, now string) error {
	// For a pod we changed the parent, which may be the cgroup that was renamed.
	called := func(path string) string {
		for _, r := range [][2]string{{was, now}, {filepath.Dir(was), filepath.Dir(now)}} {
			if rest, ok := strings.CutPrefix(path, r[0]); ok && (rest == "" || rest[0] == '/') {
				return r[1] + rest
			}
		}
		return path
	}
	if n.charger != nil {
		n.charger.Renamed(called)
	}
	return n.cfg.Journal.Rename(func(e journal.Entry) bool {
		return e.Owner.Feature == name && (e.Ref.Kind == cgroup.KindFile || e.Ref.Kind == cgroup.KindGroup || e.Ref.Kind == sched.KindKthread)
	}, func(e journal.Entry) journal.Entry {
		if e.Ref.Kind == sched.KindKthread {
			e.Wrote = called(e.Wrote)
		} else {
			e.Ref.Object = called(e.Ref.Object)
		}
		return e
	})
}
