package discover

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"strings"
)

// PodSource reports what Kubernetes knows about the pods on this node and their runtime does not.
// It finds no containers. A host without Kubernetes is not an error: the source reports Absent, and
// keeps looking for it.
type PodSource interface {
	// Name is unique among the sources of a Set.
	Name() string
	// Run watches until ctx ends. It calls publish with all pods, first as soon as they are known,
	// and again whenever they may have changed. A value from news means that there is a container,
	// perhaps of a new pod: Run then looks again soon.
	Run(ctx context.Context, news <-chan struct{}, publish func(PodReport)) error
}

// PodReport lists all pods of one PodSource, or says why they are unknown.
type PodReport struct {
	Pods   []Pod
	Err    error // the pods are unknown at present: the Set keeps the previous ones
	Absent bool  // the host seems to have no such source
}

// Pod is what a PodSource knows about one pod. Several sources may know different parts.
type Pod struct {
	Namespace, Name string
	UID             string `json:",omitempty"` // "" if the source does not know it

	// Labels and Annotations are the current ones, and replace those from the pod's start. Current
	// means that they are known.
	Labels      map[string]string `json:",omitempty"`
	Annotations map[string]string `json:",omitempty"`
	Current     bool              `json:",omitempty"`

	// Requests are those of container.Container, by container name.
	Requests map[string]map[string]uint64 `json:",omitempty"`
}

// podKey identifies a pod among those that exist at one time.
type podKey struct{ namespace, name string }

// podsReported is the last report of one PodSource. The Set's mutex guards it.
type podsReported struct {
	pods   map[podKey]Pod
	status SourceStatus
	news   chan struct{} // holds one
}

const (
	maxPods       = 4096 // of one source
	maxContainers = 256  // of one pod
)

func podsBy(pods []Pod) map[podKey]Pod {
	by := make(map[podKey]Pod, len(pods))
	for _, p := range pods[:min(len(pods), maxPods)] {
		if len(p.Requests) <= maxContainers {
			by[podKey{p.Namespace, p.Name}] = p
		}
	}
	return by
}

// reportPods records the report of the i-th PodSource.
func (s *Set) reportPods(i int, rep PodReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &s.pods[i]
	before, pods := r.status, r.pods
	if rep.Absent && len(pods) > 0 { // an earlier agent had it
		rep = PodReport{Err: fmt.Errorf("%s is not there: what was known of pods counts", r.status.Name)}
	}
	// A failing source is no reason to wait: its earlier pods remain valid.
	r.status.Err, r.status.Listed = rep.Err, true
	if rep.Err == nil {
		r.pods = podsBy(rep.Pods)
		r.status.Records, r.status.Absent = len(r.pods), rep.Absent
	}
	if reflect.DeepEqual(before, r.status) && reflect.DeepEqual(pods, r.pods) {
		return
	}
	if before.Listed != r.status.Listed || (before.Err == nil) != (r.status.Err == nil) {
		r.status.Since = s.cfg.Now()
	}
	s.poke()
}

// joinPods adds the PodSources' data to the records of pods' containers. It asks the sources to
// look again if it sees a container for the first time: its pod may have replaced an ended one of
// the same name. The caller holds s.mu.
func (s *Set) joinPods(reports []reported) {
	if len(s.pods) == 0 {
		return
	}
	seen := make(map[recordKey]bool)
	news := false
	for i := range reports {
		joined := false
		for j, rec := range reports[i].records {
			if rec.Pod == "" || rec.Sandbox {
				continue
			}
			key := recordKey{i, rec.RuntimeID, rec.PID, rec.CgroupV2}
			seen[key] = true
			news = news || !s.inPods[key]
			if !joined { // leave the report itself unchanged
				reports[i].records, joined = append([]Record(nil), reports[i].records...), true
			}
			for _, from := range s.pods {
				if p, ok := from.pods[podKey{rec.Namespace, rec.Pod}]; ok && (p.UID == "" || p.UID == rec.PodUID) {
					rec = rec.with(p)
				}
			}
			reports[i].records[j] = rec
		}
	}
	s.inPods = seen
	for _, p := range s.pods {
		if news {
			select {
			case p.news <- struct{}{}:
			default:
			}
		}
	}
}

// with returns the record of a container of p with the data of p added.
func (r Record) with(p Pod) Record {
	if len(p.Requests) > 0 {
		r.Requests = p.Requests[cmp.Or(r.Labels[containerLabel], r.Name)]
		r.PodRequests = make(map[string]uint64)
		for _, of := range p.Requests {
			for resource, n := range of {
				r.PodRequests[resource] += n
			}
		}
	}
	if !p.Current {
		return r
	}
	// Drop the pod's labels from its start. What remains are kubelet's labels of the container.
	labels := merged(p.Labels, nil)
	for key, value := range r.Labels {
		if strings.HasPrefix(key, kubeletPrefix) {
			labels[key] = value
		}
	}
	r.Labels, r.Annotations = labels, nil
	r.annotate(p.Annotations)
	r.LeftOut = nil
	return bounded(r)
}
