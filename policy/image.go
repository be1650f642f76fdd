package policy

import (
	"slices"
	"strings"

	"github.com/distribution/reference"

	"github.com/fairlead-project/fairlead/container"
)

// imageNames lists what a pattern may match to mean the image of a container: its
// reference as it was written, and the forms in which that is written out, short and
// whole. For nginx these are nginx, nginx:latest, docker.io/library/nginx and
// docker.io/library/nginx:latest. Where the image was given by digest alone its tag
// is empty, so that "nginx:*" means it and "nginx:1.*" does not.
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
			continue // a runtime may call an image as it likes
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

// anID says whether a reference is the id of an image, or the start of one as Docker
// prints it.
func anID(ref string) bool {
	const printed = 12
	digits, long := strings.CutPrefix(ref, "sha256:")
	return (long || len(digits) >= printed) && strings.Trim(digits, "0123456789abcdef") == ""
}
