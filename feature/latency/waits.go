package latency

import (
	"cmp"
	"encoding/binary"
	"errors"
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

// What a CPU does; waits.bpf.h.
const (
	doesTask = iota
	doesIdle
	doesSoftIRQ
	doesPacket
)

// wait is what a CPU did while a packet waited there.
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

// named is how many are named of those for whom a CPU worked during one wait.
const named = 3

// owners says whose a device or a cgroup is.
type owners struct {
	devices map[uint64]container.Container // as waits.bpf.h names a device
	groups  map[string]container.Container // by directory
	root    string                         // of cgroup v2; "": not known
	paths   map[uint64]string              // of cgroups that were looked up
}

// owners of now: of all containers that are known, and of those that are measured.
func (f *Latency) owners() *owners {
	var list []container.Container
	if f.cfg.Containers != nil {
		list = f.cfg.Containers.Running()
	}
	f.mu.Lock()
	for _, t := range f.tenants {
		for _, c := range t.members {
			list = append(list, c)
		}
	}
	f.mu.Unlock()
	o := &owners{devices: make(map[uint64]container.Container), groups: make(map[string]container.Container), paths: make(map[uint64]string)}
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

// path is the directory of a cgroup, "" if it has gone.
func (o *owners) path(id uint64) string {
	if p, known := o.paths[id]; known || o.root == "" {
		return p
	}
	o.paths[id] = pathOf(o.root, id)
	return o.paths[id]
}

// pathOf finds a cgroup's directory by its id, which is also its file handle.
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
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)) // our own, whatever proc is injected
	if err != nil || strings.HasSuffix(path, " (deleted)") {
		return ""
	}
	return path
}

// culprit says for whom a part of a wait was, without its time.
func (o *owners) culprit(p waitPart) api.LatencyCulprit {
	of := func(c container.Container, work string) api.LatencyCulprit {
		return api.LatencyCulprit{Work: work, Container: c.ID, Name: c.Name}
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

// wire says who took most of a wait of a packet. own are the containers whose packet it is.
func (o *owners) wire(w wait, d Direction, own []container.ID) api.LatencyWait {
	out := api.LatencyWait{Stage: w.stage.Name(d), Seconds: w.all.Seconds(), By: []api.LatencyCulprit{}}
	sum := make(map[api.LatencyCulprit]time.Duration)
	for _, p := range w.parts {
		c := o.culprit(p)
		c.Own = c.Container != 0 && slices.Contains(own, c.Container)
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
	out.By = out.By[:min(len(out.By), named)]
	for _, c := range out.By {
		rest -= time.Duration(c.Seconds * 1e9)
	}
	out.Unknown = max(rest, 0).Seconds()
	return out
}

// watch begins to keep what the CPUs do, and when applications send and read, or ends that.
func (m *meter) watch(on bool) (err error) {
	switch {
	case on && m.ran == nil:
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			return fmt.Errorf("watch CPUs: %w", err)
		}
		if err := errors.Join(m.maps.RanSince.Set(uint64(now.Nano())), m.maps.Costing.Set(uint32(1))); err != nil {
			return fmt.Errorf("watch CPUs: %w", err)
		}
		m.ran, err = m.object.Attach(latencyProgFlRanSwitch, latencyProgFlRanEntry, latencyProgFlRanExit, latencyProgFlRanRecv, latencyProgFlRanXmit,
			latencyProgFlRead, latencyProgFlSend)
		if err != nil {
			return fmt.Errorf("watch CPUs: %w", err)
		}
	case !on && m.ran != nil:
		err = m.ran.Close()
		m.ran = nil
		if serr := errors.Join(m.maps.RanSince.Set(uint64(0)), m.maps.Costing.Set(uint32(0))); serr != nil {
			return fmt.Errorf("watch CPUs: %w", serr)
		}
	}
	return err
}
