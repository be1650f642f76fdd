package serve

import (
	"slices"

	"github.com/fairlead-project/fairlead/api"
)

// featureRoutes are the routes of all features.
func featureRoutes() []route {
	return slices.Concat(
		report("netcpu", api.NetCPU{}, "",
			"Say whose packets took whose CPU time, since the agent began to count. Two readings give a rate.",
			"The same for one container: its account, and those entries of the matrix that it has a part in. The totals are the host's."),
		report("traffic", api.Traffic{},
			"a time, as 200ms, at most 30s: the answer comes after it, and says how long packets waited meanwhile",
			"Say what bandwidth each shaped container is due at the uplinks, and what it has sent. Two readings give a rate.",
			"The same for one container. There is nothing in it if policy asks for none, neither for it nor for one that shares its network."),
		latencyRoutes(), blockioRoutes(), overlayRoutes())
}
