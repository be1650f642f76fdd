package api

import (
	"context"
	"net/http"
	"time"
)

// Frame returns everything that the agent reports, read at one moment.
func (c *Client) Frame(ctx context.Context) (out Frame, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/frame", nil, &out)
}

// Overview returns how each container stands, as the agent last computed it.
func (c *Client) Overview(ctx context.Context) (out Overview, err error) {
	return out, c.do(ctx, http.MethodGet, "/v1/overview", nil, &out)
}

// Frame is everything that an agent reports, read at one moment. Views show the difference of two
// frames ([Frame.After]), and a recording keeps a frame every few seconds.
type Frame struct {
	Taken      time.Time   `json:"taken" doc:"when the agent read it"`
	Containers []Container `json:"containers" doc:"the containers that run, as of /v1/containers"`
	Reports
}

// Overview says how each container stands, over the time from Since to Taken.
type Overview struct {
	Since time.Time     `json:"since" doc:"start of the time"`
	Taken time.Time     `json:"taken" doc:"end of the time"`
	Rows  []OverviewRow `json:"rows" doc:"one element for each container, the most slowed first, then by name"`
}

// The causes by which neighbours slow a container, in Slowdown.Cause.
const (
	SlowedByPackets = "packets" // CPU time of the container that went into packets of others
	SlowedByCPU     = "cpu"     // waits for a CPU on which others ran, beside a reservation
	SlowedByUplink  = "uplink"  // waits in the queue of an uplink behind others, below the guaranteed rate
	SlowedByDisk    = "disk"    // less I/O than is reserved
)

// OverviewRow is one container.
type OverviewRow struct {
	Container ID         `json:"container,string" doc:"id of the container"`
	Name      string     `json:"name" doc:"name of the container"`
	Pod       string     `json:"pod,omitempty" doc:"Kubernetes pod name"`
	Namespace string     `json:"namespace,omitempty" doc:"Kubernetes namespace"`
	Slowed    float64    `json:"slowed" doc:"how much slower the container runs because of its neighbours: 1 minus its speed by the speed that it would have without them, 0 to 1"`
	By        []Slowdown `json:"by,omitempty" doc:"by what and by whom, the largest first"`

	CPU        float64      `json:"cpu" doc:"CPU time that its control group was charged for, in seconds per second"`
	NetworkCPU float64      `json:"network_cpu" doc:"CPU time of its packets, in seconds per second"`
	Egress     OverviewRate `json:"egress" doc:"bandwidth that it sends"`
	Ingress    OverviewRate `json:"ingress" doc:"bandwidth that it receives"`
	Added      float64      `json:"added_p99_seconds,omitempty" doc:"99th percentile of the latency that the host adds to its packets, since they are measured; absent where they are not"`
	IOPS       float64      `json:"iops" doc:"reads and writes per second of all disks"`
	Reserved   float64      `json:"reserved_iops,omitempty" doc:"reads and writes per second that it has reserved"`
	InForce    []string     `json:"in_force,omitempty" doc:"features that do something for it: NAME, or NAME STATE where that is not done"`
}

// OverviewRate is the bandwidth of one direction of one container.
type OverviewRate struct {
	Achieved float64 `json:"achieved_bits_per_second" doc:"bandwidth used"`
	Due      uint64  `json:"guaranteed_bits_per_second,omitempty" doc:"bandwidth guaranteed at the uplinks; absent without a guarantee"`
	Ceil     uint64  `json:"ceil_bits_per_second,omitempty" doc:"the most that it gets; absent without a bound of policy"`
}

// Slowdown is one reason for which a container runs slower.
type Slowdown struct {
	Cause   string  `json:"cause" doc:"packets, cpu, uplink or disk"`
	Slowed  float64 `json:"slowed" doc:"part of slowed"`
	Culprit ID      `json:"culprit,omitempty,string" doc:"id of the container that is to blame; absent for the host or if unknown"`
	Name    string  `json:"name,omitempty" doc:"name of that container"`
}
