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
	// Run watches until ctx ends. It calls publish with the whole list, once as soon as it is known
	// and again whenever it has changed. It re-lists now and then, because events get lost, and
	// reconnects itself. A panic of a goroutine that it starts is an error with a *netdev.Panic: of Run, or
	// of the Report, if it is about one container.
	Run(ctx context.Context, publish func(Report)) error
}

// Report is the whole list of one Source, a part of it, or the reason why there is none.
type Report struct {
	Records []Record

	// Created are containers that the runtime has not started, without PID. A Set finds the first process
	// of one when the runtime makes it, by its cgroup: before the program of the container runs.
	Created []Record

	// Err is why the source cannot report more. Unless the Report is Partial, the list is unknown
	// at present, and the Set keeps the last one.
	Err error

	// Partial: containers of this runtime may run that are not in Records: the runtime is not there
	// to report them, or has not yet answered about some in its list. The Set keeps what it knew of
	// these.
	Partial bool

	// Absent: Partial is set because this host has, as far as is known, no such runtime.
	Absent bool
}

// Record is a runtime's knowledge of one container. The Set finds the rest from PID (or, if that is
// 0, from CgroupV2): the cgroups, the network namespace and the interfaces.
type Record struct {
	PID       int
	Start     uint64 `json:",omitempty"` // when PID was started, as in proc; 0: it is known to live
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
	PodCgroup   string            `json:",omitempty"` // name of the directory that the CRI made for the pod alone, or ""

	LeftOut map[string]int `json:",omitempty"` // see Container; the Set fills it in

	Annotations map[string]bool `json:",omitempty"` // see Container

	Networks int `json:",omitempty"` // that the runtime gives it before it starts; 0: not known

	// Requests and PodRequests are from the sources of pods, see Container.
	Requests    map[string]uint64 `json:"-"`
	PodRequests map[string]uint64 `json:"-"`

	// Unread: the labels of the image, and then all of the container's count as the image's, its
	// names, or the pod could not be read.
	Unread bool `json:",omitempty"`

	// Sandbox: it only holds the namespaces of a pod. The runtime knows its cgroup, and it is no
	// container of its own.
	Sandbox bool `json:",omitempty"`
}

// contained calls fn. A panic of fn is its error, for the goroutine that gets it.
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

// joined adds to a partial list the earlier knowledge of running containers that it lacks, in whole
// or in part.
func joined(said, known []Record) []Record {
	at := make(map[int]int, len(said)) // by PID
	for i, rec := range said {
		at[rec.PID] = i
	}
	for _, old := range known {
		i, again := at[old.PID]
		switch {
		case old.PID == 0: // of the cgroup tree, which leaves out what it has no room for
		case again && said[i].RuntimeID == old.RuntimeID && said[i].Unread:
			said[i] = old
		case !again && len(said) < maxRecords && !errors.Is(unix.Kill(old.PID, 0), unix.ESRCH):
			said = append(said, old)
		}
	}
	return said
}

// boundedAll is bounded of each, up to the limit of a source.
func boundedAll(records []Record) []Record {
	list := make([]Record, min(len(records), maxRecords))
	for i := range list {
		list[i] = bounded(records[i])
	}
	return list
}

// bounded limits the size of what users can write. It leaves out a label that is too long, because
// a part of it would be another label; it keeps only its name, for policy to report.
func bounded(rec Record) Record {
	for _, s := range []*string{&rec.Name, &rec.RuntimeID, &rec.Image, &rec.Pod, &rec.Namespace} {
		if len(*s) > maxName {
			*s = strings.ToValidUTF8((*s)[:maxName], "")
		}
	}
	// A part of a name would be another.
	rec.ImageNames = slices.DeleteFunc(slices.Clone(rec.ImageNames), func(name string) bool { return len(name) > maxName })
	rec.ImageNames = rec.ImageNames[:min(len(rec.ImageNames), maxImageNames)]
	// Each by itself, so that an image cannot crowd out the operator's labels.
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
