package serve

import "slices"

// featureRoutes are the routes of all features.
func featureRoutes() []route {
	return slices.Concat(netcpuRoutes(), trafficRoutes(), latencyRoutes(), blockioRoutes(), overlayRoutes())
}
