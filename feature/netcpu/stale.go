package netcpu

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// dropStale undoes what was changed for devices of c that are no longer
// isolated: most have gone, since a runtime has disconnected the container from
// a network. threads are those of the devices that are, and group is where they
// are: of a cgroup that the container was moved away from all is undone.
func (n *Netcpu) dropStale(t *tenant, c container.Container, group string, threads []thread) error {
	pays, err := charged(c)
	if err != nil {
		return err
	}
	devices := make(map[string]bool)
	watched := make(map[netcpuDevice]bool)
	for _, dev := range c.Interfaces {
		if ownNAPI(dev) {
			devices[fmt.Sprintf("%d/%d", c.NetNS, dev.Index)] = true
			devices[fmt.Sprintf("%d/%d", dev.Host.NetNS, dev.Host.Index)] = true
			watched[netcpuDevice{Netns: uint32(c.NetNS), Ifindex: uint32(dev.Index)}] = true
		}
	}
	err = n.restore(func(e journal.Entry) bool {
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
	if t.early == nil {
		return err
	}
	return errors.Join(err, n.early.keep(t.early, watched))
}

// keep ends the watch of all devices of a tenant but some.
func (e *early) keep(w *watched, some map[netcpuDevice]bool) error {
	var errs []error
	for device, l := range w.links {
		if some[device] {
			continue
		}
		delete(w.links, device)
		errs = append(errs, l.Close())
		if err := e.maps.FlDevices.Delete(device); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
