package discover

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"golang.org/x/sys/unix"
)

// Source reports the containers of one runtime, or of one part of the host. An absent runtime is
// not an error: its source reports an empty list, and keeps looking for it.
type Source interface {
	// Name is the Source field of its containers.
	Name() string
	// Run watches until ctx ends. It calls publish with the whole list, first as soon as it is
	// known, and again whenever it has changed. It re-lists now and then, because events get lost,
	// and reconnects by itself. If a goroutine that it starts panics, the error of Run is a
	// *netdev.Panic, or that of the Report if it concerns one container.
	Run(ctx context.Context, publish func(Report)) error
}

// Report is the whole list of one Source, a part of it, or the reason why there is none.
type Report struct {
	Records []Record

	// Created are containers that the runtime has not started yet, without PID. A Set finds the
	// first process of each by its cgroup, before the container's program runs.
	Created []Record

	// Err is why the source cannot report more. Unless the Report is Partial, the list is unknown
	// at present, and the Set keeps the last one.
	Err error

	// Partial means that containers of this runtime may run which are not in Records: the runtime
	// is not there to report them, or has not yet answered about some in its list. The Set keeps
	// its earlier records of these.
	Partial bool

	// Absent means that Partial is set because this host seems to have no such runtime.
	Absent bool
}

// Record is what a runtime reports about one container. The Set finds the cgroups, the network
// namespace and the interfaces from PID, or from CgroupV2 if PID is 0.
type Record struct {
	PID       int
	Start     uint64 `json:",omitempty"` // when the process started, as in proc; 0: it is known to be alive
	CgroupV2  string `json:",omitempty"` // absolute path; only if the source knows no PID
	Name      string
	RuntimeID string
	Image     string            `json:",omitempty"`
	Labels    map[string]string `json:",omitempty"` // without those in ImageLabels
	Pod       string            `json:",omitempty"`
	Namespace string            `json:",omitempty"`

	ImageLabels map[string]string `json:",omitempty"` // see Container
	ImageNames  []string          `json:",omitempty"` // see Container
	PodUID      string            `json:",omitempty"`
	PodCgroup   string            `json:",omitempty"` // name of the directory that the CRI made for this pod alone, or ""

	LeftOut map[string]int `json:",omitempty"` // see Container; the Set fills it in

	Annotations map[string]bool `json:",omitempty"` // see Container

	Networks int `json:",omitempty"` // that the runtime sets up before the start; 0: unknown

	// Requests and PodRequests come from the sources of pods, see Container.
	Requests    map[string]uint64 `json:"-"`
	PodRequests map[string]uint64 `json:"-"`

	// Unread means that the pod, or the image's names or labels, could not be read. Without the
	// labels, all of the container's count as the image's.
	Unread bool `json:",omitempty"`

	// Sandbox means that it only holds the namespaces of a pod. The runtime knows its cgroup, and
	// it does not count as a container.
	Sandbox bool `json:",omitempty"`
}

// contained calls fn in a goroutine that must not panic: it turns a panic into an error.
func contained(fn func() error) (err error) {
	defer func() {
		if value := recover(); value != nil {
			p, again := value.(*netdev.Panic)
			if !again {
				p = &netdev.Panic{Value: value, Stack: debug.Stack()}
			}
			err = fmt.Errorf("panic: %v: this is a bug of fairlead; please report it with the stack in the agent's log%.0w", p.Value, p)
		}
	}()
	return fn()
}

// joined completes a partial list with the earlier records of running containers that it lacks,
// wholly or in part.
func joined(said, known []Record) []Record {
	at := make(map[int]int, len(said)) // by PID
	for i, rec := range said {
		at[rec.PID] = i
	}
	for _, old := range known {
		i, again := at[old.PID]
		switch {
		case old.PID == 0: // from the cgroup tree, which omits what it has no room for
		case again && said[i].RuntimeID == old.RuntimeID && said[i].Unread:
			said[i] = old
		case !again && len(said) < maxRecords && !errors.Is(unix.Kill(old.PID, 0), unix.ESRCH):
			said = append(said, old)
		}
	}
	return said
}

// boundedAll applies bounded to the records, up to the limit of one source.
func boundedAll(records []Record) []Record {
	list := make([]Record, min(len(records), maxRecords))
	for i := range list {
		list[i] = bounded(records[i])
	}
	return list
}

// bounded limits the size of what users can write. It drops a label that is too long, because a
// truncated label would be a different one. It keeps the label's name, for policy to report.
func bounded(rec Record) Record {
	for _, s := range []*string{&rec.Name, &rec.RuntimeID, &rec.Image, &rec.Pod, &rec.Namespace} {
		if len(*s) > maxName {
			*s = strings.ToValidUTF8((*s)[:maxName], "")
		}
	}
	// A truncated name would be a different one.
	rec.ImageNames = slices.DeleteFunc(slices.Clone(rec.ImageNames), func(name string) bool { return len(name) > maxName })
	rec.ImageNames = rec.ImageNames[:min(len(rec.ImageNames), maxImageNames)]
	// Each map has its own bound, so that an image cannot crowd out the operator's labels.
	for _, labels := range []*map[string]string{&rec.Labels, &rec.ImageLabels} {
		var leftOut map[string]int
		if *labels, leftOut = boundedLabels(*labels); len(leftOut) > 0 {
			rec.LeftOut = merged(rec.LeftOut, leftOut)
		}
	}
	return rec
}

func boundedLabels(labels map[string]string) (within map[string]string, leftOut map[string]int) {
	fits, all := len(labels) <= container.MaxLabels, 0
	for key, value := range labels {
		size := len(key) + len(value)
		all += size
		fits = fits && size <= container.MaxLabel && all <= container.MaxAll
	}
	if fits {
		return labels, nil
	}
	within, leftOut, all = make(map[string]string), make(map[string]int), 0
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		switch size := len(key) + len(labels[key]); {
		case size <= container.MaxLabel && len(within) < container.MaxLabels && all+size <= container.MaxAll:
			within[key] = labels[key]
			all += size
		case len(leftOut) < maxLeftOut:
			leftOut[key[:min(len(key), maxName)]] = size
		}
	}
	return within, leftOut
}

// merged returns a map with the entries of both; b takes precedence.
func merged[V any](a, b map[string]V) map[string]V {
	all := make(map[string]V, len(a)+len(b))
	maps.Copy(all, a)
	maps.Copy(all, b)
	return all
}
