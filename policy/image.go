package policy

import (
	"slices"
	"strings"

	"github.com/distribution/reference"

	"github.com/fairlead-project/fairlead/container"
)

// imageNames lists the forms of a container's image that a pattern may match: its reference as
// written, and its full forms, short and whole. For nginx these are nginx, nginx:latest,
// docker.io/library/nginx and docker.io/library/nginx:latest. If the image was given by digest
// alone its tag is empty, so that "nginx:*" matches it and "nginx:1.*" does not.
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
