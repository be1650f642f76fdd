package agent

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
)

// minPrefix is the least length of the prefix of a runtime id.
const minPrefix = 4

// find returns the container for ref. An exact name of a runtime's container comes first (the whole
// runtime id, the name, the pod, the name in the pod), then the id, then the name of a bare cgroup,
// which any user of the host may make; then the start of a runtime id, and a name that a table has
// cut, with its "…". id:NUMBER is only an id. Containers that have ended are found by id, for as
// long as the Set remembers them.
//
// If two containers match in the same place, the error lists them.
func (a *Agent) find(ref string) (c container.Container, ended bool, err error) {
	if ref == "" || len(ref) > 4096 {
		return c, false, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: "no container is named"}
	}
	all := a.set.Snapshot().Containers
	whole, cut := strings.CutSuffix(ref, "…")
	byID := func() (c container.Container, ended, found bool) {
		id, err := strconv.ParseUint(strings.TrimPrefix(ref, api.IDPrefix), 10, 64)
		if err == nil {
			c, found = a.set.Lookup(container.ID(id))
		}
		return c, !slices.ContainsFunc(all, func(o container.Container) bool { return o.ID == c.ID }), found
	}
	bare := func(c container.Container) bool { return c.Source == container.CgroupSource }
	for _, match := range []func(container.Container) bool{
		func(c container.Container) bool { return !bare(c) && c.RuntimeID == ref },
		func(c container.Container) bool { return !bare(c) && c.Name == ref },
		func(c container.Container) bool { return c.Pod != "" && c.Namespace+"/"+c.Pod == ref },
		func(c container.Container) bool { return !bare(c) && c.Short() == ref },
		nil, // by id
		func(c container.Container) bool { return c.Name == ref },
		func(c container.Container) bool { return len(ref) >= minPrefix && strings.HasPrefix(c.RuntimeID, ref) },
		func(c container.Container) bool { return cut && strings.HasPrefix(c.Name, whole) },
	} {
		if match == nil || strings.HasPrefix(ref, api.IDPrefix) {
			if c, ended, found := byID(); found {
				return c, ended, nil
			}
			continue
		}
		var found []container.Container
		for _, c := range all {
			if match(c) {
				found = append(found, c)
			}
		}
		switch {
		case len(found) == 1:
			return found[0], false, nil
		case len(found) > 1:
			return c, false, ambiguous(ref, found)
		}
	}
	text := fmt.Sprintf("no container %q runs here", ref)
	if near := begin(all, ref); len(near) == 1 {
		text += fmt.Sprintf("; did you mean %q?", near[0].Name)
	}
	return c, false, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: text}
}

// findToRead is find for what changes nothing: it also takes the start of a name without the sign
// that a table has cut it.
func (a *Agent) findToRead(ref string) (c container.Container, ended bool, err error) {
	c, ended, err = a.find(ref)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != "not_found" {
		return c, ended, err
	}
	switch near := begin(a.set.Snapshot().Containers, ref); len(near) {
	case 0:
		return c, false, err
	case 1:
		return near[0], false, nil
	default:
		return c, false, ambiguous(ref, near)
	}
}

// begin lists the containers with names that begin with ref.
func begin(all []container.Container, ref string) (found []container.Container) {
	for _, c := range all {
		if len(ref) >= minPrefix && (strings.HasPrefix(c.Name, ref) || strings.HasPrefix(c.Short(), ref)) {
			found = append(found, c)
		}
	}
	return found
}

// ambiguous is the error for a reference that several containers match.
func ambiguous(ref string, found []container.Container) error {
	const most = 8
	var names []string
	for _, c := range found[:min(len(found), most)] {
		names = append(names, fmt.Sprintf("%s%s (%s, %s)", api.IDPrefix, c.ID, c.Name, c.Source))
	}
	if more := len(found) - most; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return &api.Error{Status: http.StatusConflict, Code: "ambiguous",
		Text: fmt.Sprintf("%q may be any of %d containers: %s; give the id", ref, len(found), strings.Join(names, ", "))}
}
