// Package policy computes the settings of each container.
//
// There are two sources and one schema: labels (or annotations) on the container, and YAML files in a
// directory. [LoadDir] and [ParseFile] make a [Policy] from files, and its Resolve makes a [Target] for
// each container. All of that is pure and deterministic, except that LoadDir reads files. [Store] keeps
// the last good Policy while the directory changes.
//
// The package does not put a Target in force (feature/...), and does not check whether the host can
// keep its promises: features do that at admission. Package agent runs the Store; the command line
// calls [Check]. docs/policy.md is the reference of the schema for users.
package policy

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead-project/fairlead/container"
)

// Policy is the content of a set of files. It is immutable, and safe for concurrent use. The zero
// value is the empty policy.
type Policy struct {
	rules []rule
	files []string
}

// rule is one match with its set.
type rule struct {
	file  string
	line  int
	match match
	layer layer
	trust trust // of labels, where the rule matches
}

// trust says for what a container's labels count.
type trust struct {
	deny   string // the place of the "labels: deny" that applies; "": labels count
	images bool   // labels from its image count, too
	host   bool   // labels count even for keys that act on others than the container
}

// Files lists the policy's files, in order of precedence.
func (p *Policy) Files() []string { return slices.Clone(p.files) }

// Len returns the number of policies (a match with its set) in the files.
func (p *Policy) Len() int { return len(p.rules) }

// entry is one value of one key.
type entry struct {
	set    setter
	origin Origin
	column int
	label  bool // a label or annotation set it
	hand   bool // an Override
}

// layer is the content of one source: entries by the name of their key.
type layer map[string]entry

func (l layer) has(key string) bool { _, ok := l[key]; return ok }

// settings applies the entries, in the order of the keys' names.
func (l layer) settings() (Settings, []Origin) {
	var s Settings
	var origins []Origin
	for _, key := range slices.Sorted(maps.Keys(l)) {
		l[key].set(&s)
		origins = append(origins, l[key].origin)
	}
	for _, n := range []*Net{&s.Egress, &s.Ingress} {
		n.Split = n.Split && n.Latency > 0 // without a latency, splitting has no purpose
	}
	return s, origins
}

// Resolve returns one Target for each container, sorted by ID, and the Problems of its policy,
// sorted by container and key. A container without policy gets the zero Settings.
//
// If several sources set a key, the last one counts: the files in the order of their names, within a
// file from top to bottom, then what the container requested of kubelet, then its labels (and then, in
// [Store.Resolve], what was set by hand). If a policy that matches the container is in a file with
// "labels: deny", its labels do not count, with a Problem for each. Labels from its image, which are
// weaker than its own, count only if such a policy is in a file with "labels: image". Labels for a key
// with Host count only if one is in a file with "labels: host"; otherwise they are listed in Refused.
//
// An error falls back to the source before it: a broken label counts as absent. If values from
// different sources contradict each other (a rate above its ceil), the last source does not count for
// these keys. Resolve has no memory; [Store.Resolve] prefers the last good values.
func (p *Policy) Resolve(containers []container.Container) ([]Target, []Problem) {
	targets := make([]Target, 0, len(containers))
	var problems []Problem
	for _, c := range sorted(containers) {
		t, ps, _ := p.resolve(c, p.matching(c), nil, requested(c, nil), nil)
		targets, problems = append(targets, t), append(problems, ps...)
	}
	return targets, problems
}

func sorted(containers []container.Container) []container.Container {
	cs := slices.Clone(containers)
	slices.SortFunc(cs, func(a, b container.Container) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Name, b.Name), cmp.Compare(a.RuntimeID, b.RuntimeID), cmp.Compare(a.Source, b.Source))
	})
	return cs
}

// resolve resolves one container with its matching rules. last is what held before, by key, or nil;
// pass the returned layer as last the next time. asked is what the container requested of kubelet, and
// hand what was set for it by hand, or nil.
func (p *Policy) resolve(c container.Container, held []int, last layer, asked requests, hand layer) (Target, []Problem, layer) {
	layers, trust := p.layersOf(held)
	var problems, refused []Problem
	broken := map[string]bool{}
	counts := func(k Key) bool { return trust.host || k.Host == "" }
	switch {
	case trust.deny != "":
		problems = append(ignored(c.Labels, trust.deny), ignored(c.ImageLabels, trust.deny)...)
	case !trust.images:
		problems = ignored(c.ImageLabels, ofImage)
	default:
		ls := parseLabels(c.ImageLabels, nil, counts)
		refused = ls.refused
		for key, e := range ls.layer {
			e.origin.From = "image label"
			ls.layer[key] = e
		}
		problems, layers = ls.problems, append(layers, ls.layer)
	}
	labels := layer{}
	if trust.deny == "" {
		ls := parseLabels(c.Labels, c.LeftOut, counts)
		refused = append(refused, ls.refused...)
		for key, e := range ls.layer {
			if c.Annotations[e.origin.Key] {
				e.origin.From = "annotation"
				ls.layer[key] = e
			}
		}
		problems = append(problems, ls.problems...)
		for _, key := range ls.broken {
			broken[key] = true
			// Only a label stands in for a label. Otherwise a value from a file would outlive its removal from
			// that file.
			if e, ok := last[key]; ok && e.label && !ls.layer.has(key) {
				ls.layer[key] = e
			}
		}
		labels = ls.layer
		layers = append(layers, labels)
	}
	// Requests come above the labels, without keys that labels set. So a request gives way if it
	// contradicts a label: a ceil holds, whatever is requested.
	layers = append(layers, asked.without(labels))
	problems = append(problems, asked.problems...)
	if len(hand) > 0 {
		layers = append(layers, hand)
	}

	refused = slices.DeleteFunc(refused, func(p Problem) bool { return hand.has(strings.TrimPrefix(p.Key, prefix)) })
	problems = append(problems, refused...)
	problems = append(problems, p.unmatched(c)...)

	merged, found := merge(layers, last)
	for _, f := range found {
		problems = append(problems, f.problem)
		for _, key := range f.keys {
			broken[key] = true
		}
	}
	good := maps.Clone(merged)
	for key := range broken {
		delete(good, key)
		if e, ok := last[key]; ok {
			good[key] = e
		}
	}
	for _, ps := range [][]Problem{problems, refused} {
		for i := range ps {
			ps[i].Container, ps[i].Name = c.ID, c.Name
		}
	}
	t := Target{Container: c, Refused: refused}
	t.Settings, t.Origins = merged.settings()
	return t, problems, good
}

// ofImage is the reason why a container's label does not count if its image has it too, and the remedy.
// With the same value, the operator's label cannot be distinguished from the image's.
const ofImage = "it counts as its image's, which has the same label and value or was removed; " +
	"if it is yours, say labels: image in a policy file that matches the container, or run the agent with --image-labels"

// ofHost is the remedy for a label that does not count because of Key.Host.
const ofHost = "; set it in a policy file or by hand, " +
	"or say labels: host in a policy file that matches the container"

// matching lists the rules that match c, by their indices.
func (p *Policy) matching(c container.Container) (held []int) {
	names := sync.OnceValue(func() []string { return imageNames(c) })
	for i, r := range p.rules {
		if r.match.holds(c, names) {
			held = append(held, i)
		}
	}
	return held
}

// layersOf returns the layers of the matching rules for a container, lowest precedence first, and the
// trust in its labels.
func (p *Policy) layersOf(held []int) (layers []layer, t trust) {
	for _, i := range held {
		r := p.rules[i]
		layers = append(layers, r.layer)
		t.deny = cmp.Or(t.deny, r.trust.deny)
		t.images = t.images || r.trust.images
		t.host = t.host || r.trust.host
	}
	return layers, t
}

// unmatched reports labels that files refer to but that were left out or came with the image.
func (p *Policy) unmatched(c container.Container) []Problem {
	if len(c.LeftOut) == 0 && len(c.ImageLabels) == 0 {
		return nil
	}
	asked := make(map[string]bool)
	for _, r := range p.rules {
		for _, l := range r.match.labels {
			asked[l.key] = true
		}
	}
	var ls labelSet
	for _, name := range slices.Sorted(maps.Keys(asked)) {
		const reason = "no policy file can match it: "
		if size, ok := c.LeftOut[name]; ok {
			ls.add(Problem{Key: name, Reason: reason + unread(size)})
		}
		if value, ok := c.ImageLabels[name]; ok {
			ls.add(Problem{Key: name, Value: value, Reason: reason + "it counts as its image's, which has the same label and value or was removed; if it is yours, run the agent with --image-labels"})
		}
	}
	return ls.problems
}

func ignored(labels map[string]string, why string) []Problem {
	var ls labelSet
	for _, name := range ours(labels) {
		ls.add(Problem{Key: name, Value: labels[name], Reason: "is ignored: " + why})
	}
	return ls.problems
}

// contradiction is a conflict between layers, with its Problem.
type contradiction struct {
	keys    []string
	problem Problem
}

// merge merges layers. For keys that contradict each other it takes the values of last. Without these,
// it drops the topmost layer's values until the rest agrees, as values of a single layer always do.
func merge(layers []layer, last layer) (layer, []contradiction) {
	layers = slices.Clone(layers)
	var found []contradiction
	merged := overlay(layers)
	for {
		settings, _ := merged.settings()
		cs := conflicts(settings)
		if len(cs) == 0 {
			return merged, found
		}
		c := cs[0]
		if !slices.ContainsFunc(found, func(f contradiction) bool { return f.keys[0] == c.keys[0] }) {
			found = append(found, contradiction{c.keys, contradictionProblem(c, merged)})
			if kept, ok := keep(merged, last, c.keys); ok {
				merged = kept
				// From here on, the kept values stand above every layer.
				layers = append(without(layers, c.keys), kept.only(c.keys))
				continue
			}
		}
		top := len(layers) - 1
		for !layers[top].hasAny(c.keys) {
			top--
		}
		layers[top] = without(layers[top:top+1], c.keys)[0]
		merged = overlay(layers)
	}
}

func overlay(layers []layer) layer {
	merged := layer{}
	for _, l := range layers {
		maps.Copy(merged, l)
	}
	return merged
}

func (l layer) hasAny(keys []string) bool { return slices.ContainsFunc(keys, l.has) }

func (l layer) only(keys []string) layer {
	o := maps.Clone(l)
	maps.DeleteFunc(o, func(key string, _ entry) bool { return !slices.Contains(keys, key) })
	return o
}

// without returns copies of layers that lack keys.
func without(layers []layer, keys []string) []layer {
	ls := make([]layer, len(layers))
	for i, l := range layers {
		ls[i] = maps.Clone(l)
		maps.DeleteFunc(ls[i], func(key string, _ entry) bool { return slices.Contains(keys, key) })
	}
	return ls
}

// keep returns merged with the last values of keys, if there are any and they agree.
func keep(merged, last layer, keys []string) (layer, bool) {
	if !last.hasAny(keys) {
		return nil, false
	}
	old := last.only(keys)
	if s, _ := old.settings(); len(conflicts(s)) > 0 {
		return nil, false
	}
	kept := without([]layer{merged}, keys)[0]
	maps.Copy(kept, old)
	return kept, true
}

func contradictionProblem(c conflict, l layer) Problem {
	var from []string
	for _, k := range c.keys {
		from = append(from, fmt.Sprintf("%s from %s", k, l[k].origin.place()))
	}
	key := c.keys[0]
	return Problem{Key: prefix + key, Value: l[key].origin.Value, Reason: c.reason + " (" + strings.Join(from, ", ") + ")"}
}

// place returns where the value was set: "label", or "/etc/.../10-web.yaml:7".
func (o Origin) place() string {
	if o.Line == 0 {
		return printableValue(o.From) // one of our own words, never the value of a label
	}
	return fmt.Sprintf("%s:%d", plain(o.From), o.Line)
}
