package api

import "slices"

// Beside this list, each feature has a file of its own in this package, with its
// wire types, its routes and the client's calls.

// featureRoutes are the routes of all features.
func featureRoutes() []route {
	return slices.Concat(netcpuRoutes(), trafficRoutes(), latencyRoutes(), blockioRoutes(), overlayRoutes())
}

// SelfReports is what each feature shows a container of itself.
type SelfReports struct {
	Traffic *SelfTraffic `json:"traffic,omitempty" doc:"what bandwidth the container is due and gets; absent if policy asks for none"`
	Latency *SelfLatency `json:"latency,omitempty" doc:"what this host cost the container's packets; absent if that is not measured"`
	NetCPU  *SelfNetCPU  `json:"netcpu,omitempty" doc:"what the container's packets cost; absent if that is not measured"`
}
