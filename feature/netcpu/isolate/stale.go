package isolate

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// dropStale undoes what was changed for devices of c that are no longer
// isolated: most have gone, since a runtime has disconnected the container from
// a network. threads are those of the devices that are, and group is where they
// are: of a cgroup that the container was moved away from all is undone.
func (is *Isolator) dropStale(c container.Container, group string, threads []thread) error {
	pays, err := c.TenantGroup()
	if err != nil {
		return err
	}
	devices := make(map[string]bool)
	for _, dev := range c.Interfaces {
		if dev.HasHostEnd() {
			devices[fmt.Sprintf("%d/%d", c.NetNS, dev.Index)] = true
			devices[fmt.Sprintf("%d/%d", dev.Host.NetNS, dev.Host.Index)] = true
		}
	}
	return is.restore(func(e journal.Entry) bool {
		if e.Owner.Container != uint64(c.ID) {
			return false
		}
		switch e.Ref.Kind {
		case netdev.KindOffload, netdev.KindThreaded, netdev.KindRPS:
			parts := strings.SplitN(e.Ref.Object, "/", 3) // NETNS/DEVICE/DETAIL
			return len(parts) == 3 && !devices[parts[0]+"/"+parts[1]]
		case sched.KindKthread, sched.KindAffinity, sched.KindSlice:
			tid, _, _ := strings.Cut(e.Ref.Object, ":")
			return !slices.ContainsFunc(threads, func(th thread) bool { return strconv.Itoa(th.TID) == tid })
		case cgroup.KindFile:
			return filepath.Dir(e.Ref.Object) != pays
		case cgroup.KindGroup:
			return e.Ref.Object != group
		}
		return false
	})
}

// movedAlong takes over the threads that whoever moved a container from one
// cgroup to another has moved with its processes: they were ours, and go back to
// where they were before.
func (is *Isolator) movedAlong(was, now string) error {
	if was == "" || was == now {
		return nil
	}
	open := kernel.Opener(is.cfg.Roots)
	return is.cfg.Journal.Rename(func(e journal.Entry) bool {
		return e.Owner.Feature == is.cfg.Feature && e.Ref.Kind == sched.KindKthread && e.Wrote == was
	}, func(e journal.Entry) journal.Entry {
		k, err := open(e.Ref)
		if err != nil {
			return e // it has ended
		}
		if group, err := k.Read(); err == nil && group == now {
			e.Wrote = now
		}
		return e
	})
}
