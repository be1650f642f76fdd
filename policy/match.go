package policy

import (
	"slices"
	"strings"

	"github.com/distribution/reference"

	"github.com/fairlead-project/fairlead/container"
)

// match selects containers that match all of its fields. One pattern of a list suffices.
type match struct {
	name, image, namespace, pod, runtime patterns
	labels                               []labelMatch
}

type labelMatch struct {
	key    string
	values patterns
}

type patterns []string

// holds reports whether m selects c with these image names.
func (m match) holds(c container.Container, images func() []string) bool {
	// Any user with a cgroup subtree can choose such a name, so it counts only if the file asks for it.
	if m.runtime == nil && c.Source == container.CgroupSource || m.runtime != nil && !m.runtime.any(c.Source) {
		return false
	}
	// A container always has a name, if an empty one. An empty value of any other field is unknown, and no
	// pattern matches it, not even *.
	if m.name != nil && !m.name.any(c.Name) && !m.name.any(c.Short()) {
		return false
	}
	for _, f := range []struct {
		ps    patterns
		value string
	}{{m.namespace, c.Namespace}, {m.pod, c.Pod}} {
		if f.ps != nil && (f.value == "" || !f.ps.any(f.value)) {
			return false
		}
	}
	if m.image != nil && !slices.ContainsFunc(images(), m.image.any) {
		return false
	}
	for _, l := range m.labels {
		if v, ok := c.Labels[l.key]; !ok || !l.values.any(v) {
			return false
		}
	}
	return true
}

func (ps patterns) any(s string) bool {
	return slices.ContainsFunc(ps, func(p string) bool { return glob(p, s) })
}

// glob reports whether the pattern matches all of s. * stands for any bytes (slashes too, because
// images have them) and ? for any single byte. It takes at most len(pattern) * len(s) steps.
func glob(pattern, s string) bool {
	p, i := 0, 0
	star, from := -1, 0 // the last * and where its match ends at present
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p, i = p+1, i+1
		case star >= 0: // extend the last * by one byte
			from++
			p, i = star+1, from
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// imageNames lists the forms of a container's image that a pattern may match: its reference as written,
// and its full forms, short and whole. For nginx these are nginx, nginx:latest, docker.io/library/nginx
// and docker.io/library/nginx:latest. An image that was given by digest alone has an empty tag, so that
// "nginx:*" matches it and "nginx:1.*" does not.
func imageNames(c container.Container) []string {
	if c.Image == "" {
		return nil
	}
	names := []string{c.Image}
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for i, ref := range append([]string{c.Image}, c.ImageNames...) {
		if i == 0 && anID(ref) {
			continue
		}
		named, err := reference.ParseNormalizedNamed(ref)
		if err != nil {
			continue // a runtime may use any name for an image
		}
		for _, name := range []string{reference.FamiliarName(named), named.Name()} {
			tagged, hasTag := reference.TagNameOnly(named).(reference.Tagged)
			tag := ""
			if hasTag {
				tag = tagged.Tag()
			}
			add(name + ":" + tag)
			if tag == "latest" {
				add(name)
			}
			if digested, ok := named.(reference.Digested); ok {
				add(name + "@" + digested.Digest().String())
			}
		}
	}
	return names
}

// anID reports whether a reference is the id of an image, or its start as Docker prints it.
func anID(ref string) bool {
	const printed = 12
	digits, long := strings.CutPrefix(ref, "sha256:")
	return (long || len(digits) >= printed) && strings.Trim(digits, "0123456789abcdef") == ""
}
