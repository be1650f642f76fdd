package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
)

// maxLabelProblems limits the problems that one container can cause.
const maxLabelProblems = 16

// Kubernetes' own annotations for the bandwidth of a pod, and their keys. The CRI reports
// annotations among the labels.
const (
	kubernetesIngress = "kubernetes.io/ingress-bandwidth"
	kubernetesEgress  = "kubernetes.io/egress-bandwidth"
)

// labelSet is the result of reading one container's labels.
type labelSet struct {
	layer    layer
	broken   []string  // keys of invalid labels
	problems []Problem // sorted by label
	refused  []Problem // the labels that do not count for their keys, sorted
}

// parseLabels reads the labels (or annotations) of one container. It ignores labels without the prefix
// "fairlead.", except for Kubernetes' bandwidth annotations, which stand for net.ceil and
// net.ingress.ceil unless these are given. A broken label is a problem and leaves the others in force.
// Labels that contradict each other are a problem too, and neither counts. leftOut are labels too large
// to read, with their sizes in bytes. counts reports whether labels count for a key.
func parseLabels(labels map[string]string, leftOut map[string]int, counts func(Key) bool) labelSet {
	ls := labelSet{layer: layer{}}
	for _, name := range ours(leftOut) {
		ls.add(Problem{Key: name, Reason: unread(leftOut[name])})
		key, ok := keyOf(name)
		if k, _ := lookup(key); ok && counts(k) && strings.HasPrefix(name, prefix) {
			ls.broken = append(ls.broken, key)
		}
	}
	for _, name := range ours(labels) {
		value := labels[name]
		from, parse := "label", Key.parseValue
		if !strings.HasPrefix(name, prefix) {
			from, parse = "annotation", parseAnnotation
		}
		key, known := keyOf(name)
		k, _ := lookup(key)
		if !known {
			ls.add(Problem{Key: name, Value: value, Reason: unknownKey(spelled(name), names("", prefix))})
			continue
		}
		if !counts(k) {
			ls.refused = append(ls.refused, Problem{Key: name, Value: value, Reason: "is ignored: " + k.Host + ofHost})
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
		ls.layer[key] = entry{set: set, label: true, origin: Origin{Key: prefix + key, Value: value, From: from}}
	}
	for _, name := range ours(leftOut) {
		key, ok := keyOf(name)
		if k, _ := lookup(key); ok && counts(k) && !ls.layer.has(key) {
			ls.broken = append(ls.broken, key)
		}
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

// keyOf returns the key of one of our labels, and whether the label has one.
func keyOf(name string) (key string, ok bool) {
	switch name {
	case kubernetesIngress:
		return "net.ingress.ceil", true
	case kubernetesEgress:
		return "net.ceil", true
	}
	key = strings.TrimPrefix(name, prefix)
	_, ok = lookup(key)
	return key, ok
}

// unread returns the reason for a label of size bytes that was left out.
func unread(size int) string {
	if size > container.MaxLabel {
		return fmt.Sprintf("label of %d bytes is ignored: the most is %d, with its name", size, container.MaxLabel)
	}
	return fmt.Sprintf("label is ignored: the container has more than %d, or more than %d bytes of them", container.MaxLabels, container.MaxAll)
}

// ours lists the labels meant for fairlead, sorted: labels with its prefix in any case, and labels that
// are a key except for their separators.
func ours[V any](labels map[string]V) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(labels)), func(name string) bool {
		return !meant(name) && name != kubernetesIngress && name != kubernetesEgress
	})
}

func meant(name string) bool {
	const word = len(prefix) - 1
	switch {
	case len(name) <= word || !strings.EqualFold(name[:word], prefix[:word]):
		return false
	case name[word] == '.':
		return true
	}
	_, known := keyOf(spelled(name)) // foreign labels may begin with the word too
	return known
}

// spelled converts a label with other separators, such as "fairlead-net_rate", to the usual form.
func spelled(name string) string {
	if strings.ContainsAny(name, "-_/:") {
		if key, known := keyOf(strings.ToLower(strings.NewReplacer("-", ".", "_", ".", "/", ".", ":", ".").Replace(name))); known {
			return prefix + key
		}
	}
	return name
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
