package api

import "slices"

// Beside this list, each feature has a file of its own in this package, with its
// wire types, its routes and the client's calls.

// featureRoutes are the routes of all features.
func featureRoutes() []route {
	return slices.Concat(netcpuRoutes(), trafficRoutes(), latencyRoutes(), blockioRoutes())
}

// SelfReports is what each feature shows a container of itself.
type SelfReports struct {
	Traffic *SelfTraffic `json:"traffic,omitempty" doc:"what bandwidth it is due and gets; absent where policy asks for none"`
	Latency *SelfLatency `json:"latency,omitempty" doc:"what this host has cost its packets; absent where that is not measured"`
	NetCPU  *SelfNetCPU  `json:"netcpu,omitempty" doc:"what its packets cost; absent where that is not measured"`
}
