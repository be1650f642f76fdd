package serve

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

func overlayRoutes() []route {
	query := map[string]string{
		"flows": fmt.Sprintf("how many flows to list, 1 to %d, those with the latest packets first; absent: none", api.MaxOverlayFlows),
	}
	one := map[string]string{"network": "name of the network, as in the report; the name of its tunnel device will do if no other network has it"}
	return []route{
		{method: "GET", path: "/v1/overlay", query: query, out: api.Overlay{}, call: readOverlay,
			summary: "Show the overlay networks of this host, how many packets the fast path takes, and why others do not take it. Counters are totals; two readings give a rate."},
		{method: "GET", path: "/v1/containers/{ref}/overlay", query: query, out: api.Overlay{}, call: readOverlay,
			summary: "The same for one container: its ends, its flows, and the networks that these are in. No networks: the container is on none."},
		{method: "POST", path: "/v1/overlay/{network}/kill", params: one, out: api.OverlayNetwork{}, call: switchOverlay(true),
			summary: "Stop the fast path of one network at once: every packet takes the slow path, and nothing is learnt, until the network is revived or the host starts again. An agent that starts again keeps to it."},
		{method: "POST", path: "/v1/overlay/{network}/revive", params: one, out: api.OverlayNetwork{}, call: switchOverlay(false),
			summary: "End what kill has done to a network. It starts with nothing learnt."},
	}
}

func readOverlay(b Backend, r *http.Request) (any, error) {
	var ask api.OverlayAsk
	if v := r.URL.Query().Get("flows"); v != "" {
		var err error
		if ask.Flows, err = strconv.Atoi(v); err != nil || ask.Flows < 1 || ask.Flows > api.MaxOverlayFlows {
			return nil, &api.Error{Status: http.StatusBadRequest, Code: "bad_request", Text: fmt.Sprintf("flows=%q: want a number from 1 to %d", v, api.MaxOverlayFlows)}
		}
	}
	return b.Report(r.Context(), api.Ask{Feature: "overlay", Container: r.PathValue("ref"), Body: ask})
}

func switchOverlay(kill bool) func(Backend, *http.Request) (any, error) {
	return func(b Backend, r *http.Request) (any, error) {
		p, err := peer(r.Context())
		if err != nil {
			return nil, err
		}
		all, err := b.Report(r.Context(), api.Ask{Feature: "overlay", Body: api.OverlayAsk{}})
		if err != nil {
			return nil, err
		}
		n, err := find(all.(api.Overlay), r.PathValue("network"))
		if err != nil {
			return nil, err
		}
		if n.State == api.OverlayLeftAlone {
			return nil, &api.Error{Status: http.StatusConflict, Code: "refused", Text: n.Network + " has no fast path: " + n.Why}
		}
		return b.Command(r.Context(), api.Ask{Feature: "overlay", Body: api.OverlaySwitch{Network: n.Network, Kill: kill, By: fmt.Sprintf("uid %d", p.UID)}})
	}
}

// find returns the network that ref names.
func find(o api.Overlay, ref string) (api.OverlayNetwork, error) {
	var found []api.OverlayNetwork
	var names []string
	for _, n := range o.Networks {
		if n.Network == ref {
			return n, nil
		}
		if n.Device == ref {
			found, names = append(found, n), append(names, n.Network)
		}
	}
	switch len(found) {
	case 0:
		return api.OverlayNetwork{}, &api.Error{Status: http.StatusNotFound, Code: "not_found", Text: fmt.Sprintf("there is no overlay network %q here", ref)}
	case 1:
		return found[0], nil
	}
	return api.OverlayNetwork{}, &api.Error{Status: http.StatusConflict, Code: "ambiguous", Text: fmt.Sprintf("%q may be any of %s", ref, strings.Join(names, ", "))}
}
