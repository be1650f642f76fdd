package policy

import (
	"fmt"
	"slices"
	"strings"
)

// maxLabelProblems bounds what one container can make us report.
const maxLabelProblems = 16

// Kubernetes' own annotations for the bandwidth of a pod, and the keys that
// they stand for. The CRI reports annotations among the labels.
const (
	kubernetesIngress = "kubernetes.io/ingress-bandwidth"
	kubernetesEgress  = "kubernetes.io/egress-bandwidth"
)

// ParseLabels reads the labels (or annotations) of one container. Labels that
// do not begin with "fairlead." are none of ours, but for Kubernetes'
// bandwidth annotations, which stand for net.ceil and net.ingress.ceil unless
// these are given. A broken label is an error (of type [Problem], without a
// container) and leaves the others in force; so do labels that contradict each
// other, which are then both left out. Origins are sorted by key, errors by
// label.
func ParseLabels(labels map[string]string) (Settings, []Origin, []error) {
	ls := parseLabels(labels)
	settings, origins := ls.layer.settings()
	return settings, origins, errorsOf(ls.problems)
}

// labelSet is what the labels of one container say.
type labelSet struct {
	layer    layer
	broken   []string  // the keys whose labels are not valid
	problems []Problem // sorted by label
}

func parseLabels(labels map[string]string) labelSet {
	ls := labelSet{layer: layer{}}
	for _, name := range ours(labels) {
		value := labels[name]
		key, from, parse := strings.TrimPrefix(name, prefix), "label", Key.parseValue
		switch name {
		case kubernetesIngress:
			key, from, parse = "net.ingress.ceil", "annotation", parseAnnotation
		case kubernetesEgress:
			key, from, parse = "net.ceil", "annotation", parseAnnotation
		}
		k, known := lookup(key)
		if !known {
			ls.add(Problem{Key: name, Value: value, Reason: unknownKey(name, names("", prefix))})
			continue
		}
		set, err := parse(k, value)
		if err != nil {
			ls.add(Problem{Key: name, Value: value, Reason: err.Error()})
		}
		if ls.layer.has(key) || slices.Contains(ls.broken, key) {
			continue // a "fairlead." label wins; it sorts before "kubernetes.io/"
		}
		if err != nil {
			ls.broken = append(ls.broken, key)
			continue
		}
		ls.layer[key] = entry{set: set, origin: Origin{Key: prefix + key, Value: value, From: from}}
	}
	settings, _ := ls.layer.settings()
	for _, c := range conflicts(settings) {
		ls.add(Problem{Key: prefix + c.keys[0], Value: ls.layer[c.keys[0]].origin.Value, Reason: c.reason})
		for _, k := range c.keys {
			ls.broken = append(ls.broken, k)
			delete(ls.layer, k)
		}
	}
	return ls
}

// ours lists the labels that speak to fairlead, sorted.
func ours(labels map[string]string) []string {
	var ns []string
	for n := range labels {
		if strings.HasPrefix(n, prefix) || n == kubernetesIngress || n == kubernetesEgress {
			ns = append(ns, n)
		}
	}
	slices.Sort(ns)
	return ns
}

func (ls *labelSet) add(p Problem) {
	switch n := len(ls.problems); {
	case n < maxLabelProblems:
		ls.problems = append(ls.problems, p)
	case n == maxLabelProblems:
		ls.problems = append(ls.problems, Problem{Reason: fmt.Sprintf("more than %d labels are wrong; the rest is not reported", maxLabelProblems)})
	}
}

func parseAnnotation(k Key, value string) (setter, error) {
	r, err := parseBandwidth(value)
	if err == nil {
		err = saneRate(r)
	}
	if err != nil {
		return nil, err
	}
	return k.parse(FormatRate(r))
}
