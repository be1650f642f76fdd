package latency

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Kinds of work of a CPU: DOES_ in waits.bpf.h.
const (
	doesTask = iota
	doesIdle
	doesSoftIRQ
	doesPacket
)

// wait is the work of a CPU while a packet waited for it.
type wait struct {
	stage Stage
	all   time.Duration
	parts []waitPart
}

type waitPart struct {
	kind      uint32
	who, last uint64
	ns        time.Duration
}

// maxCulprits limits how many containers a wait lists.
const maxCulprits = 3

// attribution maps the devices and cgroups of waits to containers.
type attribution struct {
	devices map[uint64]container.Container // by name_of of waits.bpf.h
	groups  map[string]container.Container // by directory
	root    string                         // of cgroup v2; "": unknown
	paths   map[uint64]string              // directories of cgroup ids looked up before
}

// attribution returns the attribution to all running containers, and to those that the feature knows.
func (f *Latency) attribution() *attribution {
	var list []container.Container
	if f.cfg.Containers != nil {
		list = f.cfg.Containers.Running()
	}
	f.mu.Lock()
	for _, t := range f.tenants.Tenants() {
		for _, m := range t.Members() {
			list = append(list, m.Container)
		}
	}
	f.mu.Unlock()
	o := &attribution{devices: make(map[uint64]container.Container), groups: make(map[string]container.Container), paths: make(map[uint64]string)}
	for _, c := range list {
		if c.Cgroup.V2 != "" {
			o.groups[c.Cgroup.V2] = c
		}
		for _, dev := range c.Interfaces {
			o.devices[c.NetNS<<32|uint64(dev.Index)] = c
			if dev.Host.NetNS != 0 {
				o.devices[dev.Host.NetNS<<32|uint64(dev.Host.Index)] = c
			}
		}
	}
	if layout, err := cgroup.Detect(f.cfg.Roots.Proc, f.cfg.Roots.Cgroup); err == nil {
		o.root = layout.V2
	}
	return o
}

// path returns the directory of a cgroup, "" if it has gone.
func (o *attribution) path(id uint64) string {
	if p, known := o.paths[id]; known || o.root == "" {
		return p
	}
	o.paths[id] = pathOf(o.root, id)
	return o.paths[id]
}

// pathOf returns the directory of a cgroup by its id, which is also its file handle.
func pathOf(root string, id uint64) string {
	dir, err := os.Open(root)
	if err != nil {
		return ""
	}
	defer dir.Close()
	const kernfs = 0xfe // FILEID_KERNFS, include/linux/exportfs.h
	handle := unix.NewFileHandle(kernfs, binary.NativeEndian.AppendUint64(nil, id))
	fd, err := unix.OpenByHandleAt(int(dir.Fd()), handle, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)) // of this process, even with another proc root
	if err != nil || strings.HasSuffix(path, " (deleted)") {
		return ""
	}
	return path
}

// culprit returns the work of a part of a wait, and its container. It does not set the time.
func (o *attribution) culprit(p waitPart) api.LatencyCulprit {
	of := func(c container.Container, work string) api.LatencyCulprit {
		return api.LatencyCulprit{Work: work, Container: api.ID(c.ID), Name: c.Name}
	}
	switch p.kind {
	case doesIdle:
		return api.LatencyCulprit{Work: api.LatencyIdle}
	case doesSoftIRQ:
		return api.LatencyCulprit{Work: api.LatencySoftIRQ}
	case doesPacket:
		for _, dev := range []uint64{p.who, p.last} {
			if c, known := o.devices[dev]; known {
				return of(c, api.LatencyPackets)
			}
		}
		return api.LatencyCulprit{Work: api.LatencyPackets}
	}
	path := o.path(p.who)
	for dir := path; len(dir) > len(o.root); dir = filepath.Dir(dir) {
		if c, known := o.groups[dir]; known {
			return of(c, api.LatencyTasks)
		}
	}
	out := api.LatencyCulprit{Work: api.LatencyTasks, Cgroup: strings.TrimPrefix(path, o.root)}
	if path == "" {
		out.Cgroup = fmt.Sprintf("id %d", p.who)
	} else if path == o.root {
		out.Cgroup = "/"
	}
	return out
}

// wire converts a wait to the API's form, with the largest culprits. own are the members of the
// packet's tenant.
func (o *attribution) wire(w wait, d Direction, own []container.ID) api.LatencyWait {
	out := api.LatencyWait{Stage: w.stage.Name(d), Seconds: w.all.Seconds(), By: []api.LatencyCulprit{}}
	sum := make(map[api.LatencyCulprit]time.Duration)
	for _, p := range w.parts {
		c := o.culprit(p)
		c.Own = c.Container != 0 && slices.Contains(own, container.ID(c.Container))
		sum[c] += p.ns
	}
	rest := w.all
	for c, ns := range sum {
		c.Seconds = ns.Seconds()
		out.By = append(out.By, c)
	}
	slices.SortFunc(out.By, func(a, b api.LatencyCulprit) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Work, b.Work), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Cgroup, b.Cgroup))
	})
	out.By = out.By[:min(len(out.By), maxCulprits)]
	for _, c := range out.By {
		rest -= time.Duration(c.Seconds * 1e9)
	}
	out.Unknown = max(rest, 0).Seconds()
	return out
}

// work is the time that each CPU has worked for packets, by container and CPU.
type work map[container.ID][]time.Duration

// packetWork returns nil if the packet work is unknown.
func (f *Latency) packetWork() work {
	if f.cfg.Work == nil {
		return nil
	}
	w, err := f.cfg.Work.PacketWork()
	if err != nil {
		return nil
	}
	return w
}

// since returns the work after an earlier reading. A counter that went down has restarted.
func (w work) since(before work) work {
	out := make(work, len(w))
	for id, now := range w {
		now = slices.Clone(now)
		for cpu, was := range before[id] {
			if cpu < len(now) && now[cpu] >= was {
				now[cpu] -= was
			}
		}
		out[id] = now
	}
	return out
}

// meanwhile returns the packet work, by container, of the CPUs that handled a tenant's packets. It
// leaves out CPUs that did less than a hundredth of the tenant's own work. It returns nil if the
// work is unknown.
func (w work) meanwhile(members []container.ID, over time.Duration, name func(container.ID) string) *api.LatencyMeanwhile {
	i := slices.IndexFunc(members, func(id container.ID) bool { return len(w[id]) > 0 })
	if i < 0 || over <= 0 {
		return nil
	}
	own, all := w[members[i]], time.Duration(0)
	for _, d := range own {
		all += d
	}
	out := &api.LatencyMeanwhile{CPUs: []int{}, By: []api.LatencyNeighbour{}}
	for cpu, d := range own {
		if d > 0 && d >= all/100 {
			out.CPUs = append(out.CPUs, cpu)
		}
	}
	if len(out.CPUs) == 0 {
		return nil
	}
	share := func(of []time.Duration) float64 {
		var sum time.Duration
		for _, cpu := range out.CPUs {
			if cpu < len(of) {
				sum += of[cpu]
			}
		}
		return sum.Seconds() / (over.Seconds() * float64(len(out.CPUs)))
	}
	out.Own = share(own)
	for id, of := range w {
		if s := share(of); s > 0 && !slices.Contains(members, id) {
			out.By = append(out.By, api.LatencyNeighbour{Container: api.ID(id), Name: name(id), Share: s})
		}
	}
	slices.SortFunc(out.By, func(a, b api.LatencyNeighbour) int {
		return cmp.Or(cmp.Compare(b.Share, a.Share), cmp.Compare(a.Container, b.Container))
	})
	return out
}
