package serve

import (
	"net/http"

	"github.com/fairlead-project/fairlead/api"
)

func trafficRoutes() []route {
	return append(report("traffic", api.Traffic{},
		"a time, as 200ms, at most 30s: the answer comes after it, and says how long packets waited meanwhile",
		"Say what bandwidth each shaped container is due at the uplinks, and what it has sent. Two readings give a rate.",
		"The same for one container. There is nothing in it if policy asks for none, neither for it nor for one that shares its network."),
		route{
			method: "GET", path: "/v1/traffic/volumes", out: api.Volumes{}, call: volumes,
			query:   map[string]string{"of": "the name of one account, or a container as in other paths: with its earlier days and months"},
			summary: "Show what containers have sent and received under their names, by day and month, over restarts of containers, agent and host, and the volumes of policy.",
		})
}

func volumes(b Backend, r *http.Request) (any, error) {
	return b.Report(r.Context(), api.Ask{Feature: "traffic", Body: api.VolumesAsk{Of: r.URL.Query().Get("of")}})
}
