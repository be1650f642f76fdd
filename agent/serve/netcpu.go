package serve

import "github.com/fairlead-project/fairlead/api"

func netcpuRoutes() []route {
	return report("netcpu", api.NetCPU{}, "",
		"Say whose packets took whose CPU time, since the agent began to count. Two readings give a rate.",
		"The same for one container: its account, and those entries of the matrix that it has a part in. The totals are the host's.")
}
