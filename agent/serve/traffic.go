package serve

import "github.com/fairlead-project/fairlead/api"

func trafficRoutes() []route {
	return report("traffic", api.Traffic{},
		"a time, as 200ms, at most 30s: the answer comes after it, and says how long packets waited meanwhile",
		"Say what bandwidth each shaped container is due at the uplinks, and what it has sent. Two readings give a rate.",
		"The same for one container. There is nothing in it if policy asks for none, neither for it nor for one that shares its network.")
}
