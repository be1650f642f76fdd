package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead-project/fairlead/container"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"
)

// Limits of one file.
const (
	maxRules    = 1000
	maxPatterns = 64  // in one list
	maxPattern  = 256 // bytes
	maxProblems = 100
)

// ParseFile reads one policy file; name is for the Problems and Origins. It reports all errors at
// once, in the order of the lines (at most 100 Problems), and the Policy is then nil.
// docs/policy.md describes the form.
func ParseFile(name string, data []byte) (*Policy, []Problem) {
	r := &reader{file: name}
	docs := r.parse(data)
	for _, d := range docs {
		r.document(d)
	}
	if said := r.labels; said != nil {
		t := trust{images: said.value == "image", host: said.value == "host"}
		if said.value == "deny" {
			t.deny = fmt.Sprintf("%s:%d says labels: deny", plain(name), said.line)
		}
		for i := range r.rules {
			r.rules[i].trust = t
		}
	}
	r.emptyRules()
	if len(r.problems) > 0 {
		sortByPlace(r.problems)
		if len(r.problems) > maxProblems {
			r.problems = append(r.problems[:maxProblems], Problem{File: name, Reason: fmt.Sprintf("has more than %d problems; the rest is not reported", maxProblems)})
		}
		return nil, r.problems
	}
	return &Policy{rules: r.rules, files: []string{name}}, nil
}

// reader converts the documents of one file to rules, and collects errors.
type reader struct {
	file     string
	rules    []rule
	places   []place // of the rules, for emptyRules
	labels   *place  // of the value of "labels"
	problems []Problem
}

// place is a position in the file, with the text there if it matters.
type place struct {
	line, column int
	value        string
}

func placeOf(tk *token.Token) place {
	if tk == nil || tk.Position == nil {
		return place{line: 1, column: 1}
	}
	return place{line: tk.Position.Line, column: tk.Position.Column, value: tk.Value}
}

func (r *reader) problem(at place, key, value, format string, args ...any) {
	r.problems = append(r.problems, Problem{File: r.file, Line: at.line, Column: at.column, Key: key, Value: value, Reason: fmt.Sprintf(format, args...)})
}

// pair is a key of a mapping and its value.
type pair struct {
	key   string
	at    place // of the key
	value ast.Node
}

// pairs lists a mapping. It reports and skips keys that occur twice or are not plain text.
func (r *reader) pairs(n ast.Node) []pair {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	}
	var ps []pair
	first := map[string]int{} // line by key
	for _, v := range values {
		at := placeOf(v.Key.GetToken())
		key, ok := scalar(v.Key)
		if !ok {
			r.problem(at, "", "", "a key must be plain text")
			continue
		}
		if line := first[key]; line > 0 {
			r.problem(at, key, "", "is given twice, first in line %d", line)
			continue
		}
		first[key] = at.line
		ps = append(ps, pair{key, at, v.Value})
	}
	return ps
}

func isMapping(n ast.Node) bool {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return true
	}
	return false
}

// scalar returns the text of a node as written, without quotes. ok is false for null, mappings and
// lists.
func scalar(n ast.Node) (text string, ok bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return strings.TrimSuffix(n.Value.Value, "\n"), true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	}
	return "", false
}

// scalars returns the texts of a scalar or of a list of scalars.
func (r *reader) scalars(key string, at place, n ast.Node) []place {
	nodes := []ast.Node{n}
	if list, ok := n.(*ast.SequenceNode); ok {
		nodes = list.Values
		if len(nodes) == 0 {
			r.problem(at, key, "", "must not be an empty list")
		}
		if len(nodes) > maxPatterns {
			r.problem(at, key, "", "has more than %d elements", maxPatterns)
			return nil
		}
	}
	var ps []place
	for _, n := range nodes {
		s, ok := scalar(n)
		if !ok {
			r.problem(at, key, "", "must be %s", map[bool]string{true: "given a value", false: "plain text"}[n == nil || n.Type() == ast.NullType])
			continue
		}
		p := placeOf(n.GetToken())
		p.value = s
		ps = append(ps, p)
	}
	return ps
}

func (r *reader) document(n ast.Node) {
	if !isMapping(n) {
		r.problem(placeOf(n.GetToken()), "", "", "must be a mapping with the keys labels, policies, match, set")
		return
	}
	var list, matched, set *pair
	for _, p := range r.pairs(n) {
		switch p.key {
		case "labels":
			r.fileLabels(p)
		case "policies":
			list = &p
		case "match":
			matched = &p
		case "set":
			set = &p
		default:
			r.unknown(p, "", []string{"labels", "policies", "match", "set"})
		}
	}
	if matched != nil || set != nil {
		at := cmp.Or(matched, set).at
		if list != nil {
			r.problem(at, "policies", "", "cannot stand beside match and set in one document")
		}
		r.rule(at, matched, set)
	}
	if list != nil {
		r.policies(*list)
	}
}

func (r *reader) unknown(p pair, path string, known []string) {
	r.problem(p.at, path+p.key, "", "%s", unknownKey(p.key, known))
}

func (r *reader) fileLabels(p pair) {
	v, _ := scalar(p.value)
	at := placeOf(p.value.GetToken())
	at.value = v
	switch {
	case !slices.Contains([]string{"allow", "deny", "image", "host"}, v):
		r.problem(at, "labels", v, "must be allow, deny, host or image")
	case r.labels != nil:
		r.problem(p.at, "labels", "", "is given twice, first in line %d; it holds for the whole file", r.labels.line)
	default:
		r.labels = &at
	}
}

func (r *reader) policies(p pair) {
	list, ok := p.value.(*ast.SequenceNode)
	if !ok {
		r.problem(p.at, p.key, "", "must be a list of mappings with match and set")
		return
	}
	for _, n := range list.Values {
		if !isMapping(n) {
			r.problem(placeOf(n.GetToken()), p.key, "", "must be a list of mappings with match and set")
			continue
		}
		var matched, set *pair
		at := p.at
		for i, e := range r.pairs(n) {
			if i == 0 {
				at = e.at
			}
			switch e.key {
			case "match":
				matched = &e
			case "set":
				set = &e
			case "labels":
				r.problem(e.at, "labels", "", "belongs at the top of the file: it holds for the whole file")
			default:
				r.unknown(e, "", []string{"match", "set"})
			}
		}
		r.rule(at, matched, set)
	}
}

func (r *reader) rule(at place, matched, set *pair) {
	ru := rule{file: r.file, line: at.line}
	if matched == nil {
		r.problem(at, "match", "", `is missing; match: {name: "*"} is every container`)
	} else {
		ru.match = r.match(*matched)
	}
	if set != nil {
		ru.layer = r.set(*set)
	}
	if len(r.rules) == maxRules {
		r.problem(at, "", "", "more than %d policies in one file", maxRules)
	}
	if len(r.rules) <= maxRules {
		r.rules, r.places = append(r.rules, ru), append(r.places, at)
	}
}

// emptyRules reports rules without effect: a rule may lack set only under "labels: deny", "labels:
// host" or "labels: image".
func (r *reader) emptyRules() {
	if r.labels != nil && r.labels.value != "allow" {
		return
	}
	for i, ru := range r.rules {
		if ru.layer == nil {
			r.problem(r.places[i], "set", "", "is missing")
		}
	}
}

func (r *reader) match(p pair) match {
	var m match
	if !isMapping(p.value) {
		r.problem(p.at, p.key, "", `must be a mapping, like {name: "web-*"}`)
		return m
	}
	ps := r.pairs(p.value)
	if len(ps) == 0 {
		r.problem(p.at, p.key, "", "must name at least one of name, image, labels, namespace, pod, runtime")
	}
	fields := map[string]*patterns{"name": &m.name, "image": &m.image, "namespace": &m.namespace, "pod": &m.pod}
	for _, e := range ps {
		switch e.key {
		case "name", "image", "namespace", "pod":
			*fields[e.key] = r.patterns("match."+e.key, e)
		case "runtime":
			m.runtime = r.runtimes(e)
		case "labels":
			if !isMapping(e.value) {
				r.problem(e.at, "match.labels", "", "must be a mapping of labels to patterns")
				continue
			}
			for _, l := range r.pairs(e.value) {
				m.labels = append(m.labels, labelMatch{l.key, r.patterns("match.labels."+l.key, l)})
			}
			if len(m.labels) == 0 || len(m.labels) > maxPatterns {
				r.problem(e.at, "match.labels", "", "must have between 1 and %d labels", maxPatterns)
			}
		default:
			r.unknown(e, "match.", []string{"name", "image", "namespace", "pod", "runtime", "labels"})
		}
	}
	return m
}

// runtimes reads patterns for a container's source.
func (r *reader) runtimes(p pair) patterns {
	known := []string{"docker", "podman", "containerd", "cri-o", "sandbox", container.CgroupSource}
	ps := r.patterns("match.runtime", p)
	for _, t := range ps {
		if !slices.ContainsFunc(known, func(name string) bool { return glob(t, name) }) {
			r.problem(p.at, "match.runtime", t, "must be one of %s", strings.Join(known, ", "))
		}
	}
	return ps
}

func (r *reader) patterns(key string, p pair) patterns {
	ps := patterns{}
	for _, t := range r.scalars(key, p.at, p.value) {
		if t.value == "" || len(t.value) > maxPattern {
			r.problem(t, key, t.value, "a pattern must have between 1 and %d bytes", maxPattern)
		}
		ps = append(ps, t.value)
	}
	return ps
}

// set reads the settings of one rule, dotted or nested.
func (r *reader) set(p pair) layer {
	l := layer{}
	if !isMapping(p.value) {
		r.problem(p.at, p.key, "", "must be a mapping, like {net.rate: 50mbit}")
		return l
	}
	seen := map[string]int{} // line by key, including keys with invalid values
	r.settings(l, seen, "", p.value)
	if len(seen) == 0 && len(r.problems) == 0 {
		r.problem(p.at, p.key, "", "must not be empty")
	}
	s, _ := l.settings()
	for _, c := range conflicts(s) {
		// The later line is to blame.
		at := l[c.keys[0]]
		for _, k := range c.keys[1:] {
			if e := l[k]; cmp.Or(cmp.Compare(e.origin.Line, at.origin.Line), cmp.Compare(e.column, at.column)) > 0 {
				at = e
			}
		}
		r.problem(place{line: at.origin.Line, column: at.column}, strings.TrimPrefix(at.origin.Key, prefix), at.origin.Value, "%s", c.reason)
	}
	return l
}

func (r *reader) settings(l layer, seen map[string]int, path string, n ast.Node) {
	for _, p := range r.pairs(n) {
		name := path + p.key
		k, known := lookup(name)
		group := len(names(name+".", "")) > 0
		switch {
		case isMapping(p.value) && group:
			r.settings(l, seen, name+".", p.value)
		case known && isMapping(p.value):
			r.problem(p.at, name, "", "must be a value, not a mapping")
		case known && seen[name] > 0:
			r.problem(p.at, name, "", "is given twice, first in line %d", seen[name])
		case known:
			seen[name] = p.at.line
			r.setting(l, k, p)
		case group:
			r.problem(p.at, name, "", "is a group of keys: %s", strings.Join(names(name+".", ""), ", "))
		case strings.HasPrefix(name, prefix):
			r.problem(p.at, name, "", "unknown key: in a file the keys have no prefix %q", prefix)
		default:
			r.unknown(pair{key: name, at: p.at}, "", names("", ""))
		}
	}
}

func (r *reader) setting(l layer, k Key, p pair) {
	if _, isList := p.value.(*ast.SequenceNode); isList && !k.list {
		r.problem(p.at, k.Name, "", "must be one value, not a list")
		return
	}
	texts := r.scalars(k.Name, p.at, p.value)
	if len(texts) == 0 {
		return
	}
	var values []string
	for _, t := range texts {
		values = append(values, t.value)
	}
	value, at := strings.Join(values, "; "), texts[0]
	set, err := k.parseValue(value)
	if err != nil {
		// In a list, blame the element that is invalid by itself.
		for _, t := range texts {
			if _, alone := k.parseValue(t.value); alone != nil {
				value, at, err = t.value, t, alone
				break
			}
		}
		r.problem(at, k.Name, value, "%s", err)
		return
	}
	l[k.Name] = entry{set: set, column: at.column, origin: Origin{Key: prefix + k.Name, Value: value, From: r.file, Line: at.line}}
}
