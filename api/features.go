package api

// Beside this list, each feature has a file of its own in this package, with its
// wire types and the client's calls. Its routes are in agent/serve.

// SelfReports is what each feature shows a container of itself.
type SelfReports struct {
	Traffic *SelfTraffic `json:"traffic,omitempty" doc:"what bandwidth the container is due and gets; absent if policy asks for none"`
	Latency *SelfLatency `json:"latency,omitempty" doc:"what this host cost the container's packets; absent if that is not measured"`
	NetCPU  *SelfNetCPU  `json:"netcpu,omitempty" doc:"what the container's packets cost; absent if that is not measured"`
}
