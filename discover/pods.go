package discover

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"strings"
)

// PodSource reports what Kubernetes knows of the pods on this node and their runtime does not. It
// finds no containers. An absent Kubernetes is not an error: its source reports that, and keeps
// looking for it.
type PodSource interface {
	// Name is unique among the sources of a Set.
	Name() string
	// Run watches until ctx ends. It calls publish with all pods, once as soon as they are known
	// and again whenever they may have changed. It looks again soon after each value from news: there
	// is a container that may be of a new pod.
	Run(ctx context.Context, news <-chan struct{}, publish func(PodReport)) error
}

// PodReport is all pods of one PodSource, or the reason why there are none.
type PodReport struct {
	Pods   []Pod
	Err    error // the pods are unknown at present: the Set keeps the last ones
	Absent bool  // there is, as far as is known, no such source on this host
}

// Pod is what a PodSource knows of one pod. Several sources may know different parts.
type Pod struct {
	Namespace, Name string
	UID             string `json:",omitempty"` // "" if the source does not know it

	// Labels and Annotations are those of now, in place of those of the pod's start. Current: they
	// are known.
	Labels      map[string]string `json:",omitempty"`
	Annotations map[string]string `json:",omitempty"`
	Current     bool              `json:",omitempty"`

	// Requests are those of container.Container, by container.
	Requests map[string]map[string]uint64 `json:",omitempty"`
}

// podKey distinguishes the pods of one moment.
type podKey struct{ namespace, name string }

// podsReported is what one PodSource has reported. The Set's mutex guards it.
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
	if rep.Absent && len(pods) > 0 { // it was there for an earlier agent
		rep = PodReport{Err: fmt.Errorf("%s is not there: what was known of pods counts", r.status.Name)}
	}
	// One that fails is no reason to wait: what was known of pods counts.
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

// joinPods adds what is known of pods to the records of their containers. It asks the sources to
// look again if there is a container that the last call did not see: a pod of its name may have
// ended, and another begun. The caller holds s.mu.
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
			if !joined { // the report's own stay as they were
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

// with returns the record of a container of p with what is known of that.
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
	// The pod's own of its start make way. What is left are the kubelet's of the container.
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
