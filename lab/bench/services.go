package bench

import (
	"fmt"

	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/rig"
)

// serviceConns is how many requests are under way at once.
const serviceConns = 16

// services are real servers on CPU 0, with a client in a container on CPU 1, on a bridge as
// Docker's: nothing is steered, so packets are received on the CPU that sent them. A neighbour on
// CPU 0 is idle, computes, or is flooded from CPU 1. Only the server and the neighbour are
// protected.
//
// The flood takes the client's CPU, whatever the host does about it. Therefore its control (off)
// has the same flood dropped before the host, beside a neighbour that computes, with the same
// protection.
func services() []setup {
	flooded := func(name string, rate uint64) demand {
		return demand{name: "beside " + name, traffic: rig.Traffic{Kind: rig.UDP, Neighbours: 1, Fair: true}, rate: rate, control: true}
	}
	var all []setup
	for _, service := range []rig.Service{rig.Redis, rig.Memcache, rig.Nginx, rig.Postgres} {
		for _, quota := range []float64{20, 50, 100} {
			for _, mode := range []string{"isolate", "auto"} {
				all = append(all, setup{
					name: fmt.Sprintf("%s %v %s", service, quota, mode),
					cfg: rig.Config{Path: rig.NIC, Unsteered: true, Containers: []rig.Container{
						{Name: "at-server", Quota: quota}, {Name: "at-neighbour", Quota: 50}, {Name: "client", CPU: rig.SenderCPU},
					}},
					service: service, protect: "at-", mode: mode, compute: true, alone: true,
					demands: []demand{
						{name: "alone", idle: true},
						{name: "beside cpu"},
						flooded("150k", 150_000), flooded("400k", 400_000), flooded("flood", load.Flood),
					},
				})
			}
		}
	}
	return all
}

// serviceClient is the client's place among the containers of services.
const serviceClient = 2
