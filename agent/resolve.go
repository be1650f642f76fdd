package agent

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
)

// minPrefix is how much of a runtime id must be given to mean a container.
const minPrefix = 4

// find returns the container that ref names: by id, by the whole runtime id, by
// name, or by the start of its runtime id, in this order. So no container can
// hide another's id by its name. Containers that have ended are found by id, for
// as long as the Set remembers them.
func (a *Agent) find(ref string) (c container.Container, ended bool, err error) {
	if ref == "" || len(ref) > 4096 {
		return c, false, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: "no container is named"}
	}
	all := a.set.Snapshot().Containers
	if id, err := strconv.ParseUint(ref, 10, 64); err == nil {
		if c, ok := a.set.Lookup(container.ID(id)); ok {
			runs := slices.ContainsFunc(all, func(o container.Container) bool { return o.ID == c.ID })
			return c, !runs, nil
		}
	}
	for _, match := range []func(container.Container) bool{
		func(c container.Container) bool { return c.RuntimeID == ref },
		func(c container.Container) bool { return c.Name == ref },
		func(c container.Container) bool { return c.Pod != "" && c.Namespace+"/"+c.Pod == ref },
		func(c container.Container) bool { return c.Short() == ref },
		func(c container.Container) bool { return len(ref) >= minPrefix && strings.HasPrefix(c.RuntimeID, ref) },
	} {
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
			ids := make([]string, 0, 8)
			for _, c := range found[:min(len(found), cap(ids))] {
				ids = append(ids, c.ID.String())
			}
			return c, false, &api.Error{Status: http.StatusConflict, Code: "ambiguous",
				Text: fmt.Sprintf("%q may be any of %d containers; give one of these ids: %s", ref, len(found), strings.Join(ids, " "))}
		}
	}
	return c, false, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: fmt.Sprintf("no container %q runs here", ref)}
}
