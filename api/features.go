package api

// Each feature has its own file in this package, with its wire types and the client's calls. Its
// routes are in agent/serve.

// SelfReports holds what each feature reports to a container about itself.
type SelfReports struct {
	Traffic *SelfTraffic `json:"traffic,omitempty" doc:"what bandwidth the container is due and gets; absent if policy asks for none"`
	Latency *SelfLatency `json:"latency,omitempty" doc:"what this host cost the container's packets; absent if that is not measured"`
	NetCPU  *SelfNetCPU  `json:"netcpu,omitempty" doc:"what the container's packets cost; absent if that is not measured"`
}

// Reports holds each feature's report about all containers, as of /v1/NAME. It has no report of a
// feature that does not answer or that this host does not support.
type Reports struct {
	NetCPU  *NetCPU  `json:"netcpu,omitempty" doc:"as of /v1/netcpu"`
	Traffic *Traffic `json:"traffic,omitempty" doc:"as of /v1/traffic"`
	Latency *Latency `json:"latency,omitempty" doc:"as of /v1/latency"`
	Overlay *Overlay `json:"overlay,omitempty" doc:"as of /v1/overlay"`
	BlockIO *BlockIO `json:"blockio,omitempty" doc:"as of /v1/blockio"`
}

// Take puts the report of one feature into r. It ignores a report of another type.
func (r *Reports) Take(report any) {
	switch report := report.(type) {
	case NetCPU:
		r.NetCPU = &report
	case Traffic:
		r.Traffic = &report
	case Latency:
		r.Latency = &report
	case Overlay:
		r.Overlay = &report
	case BlockIO:
		r.BlockIO = &report
	}
}

// since returns functions that fill a row of an overview with what the features have measured since
// earlier reports. Each returns the losses of the row's container.
func (r Reports) since(before Reports) []func(*OverviewRow) losses {
	return []func(*OverviewRow) losses{r.NetCPU.slowed(before.NetCPU), r.Traffic.slowed(before.Traffic), r.BlockIO.slowed(), r.Latency.slowed()}
}

// Actions lists what features do for a container or to it, in no particular order.
func (r Reports) Actions(id ID) []Evidence { return r.BlockIO.actions(id) }
