package agent

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead-project/fairlead/agent/deviceplugin"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/discover/kubernetes"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// mostDevices bounds the devices of one resource; docs/kubernetes.md has what they cost kubelet.
const mostDevices = 100_000

// pods returns the sources of what Kubernetes knows of pods.
func pods(cfg Config) (sources []discover.PodSource) {
	if cfg.KubeletDir != "" {
		sources = append(sources, kubernetes.Kubelet{
			Socket: filepath.Join(cfg.KubeletDir, "pod-resources", "kubelet.sock"), Domain: policy.RequestDomain,
		})
	}
	if cfg.Kubeconfig != "" {
		sources = append(sources, kubernetes.APIServer{Kubeconfig: cfg.Kubeconfig, Node: nodeName(cfg)})
	}
	return sources
}

// nodeName returns the name of this node: by default, as kubelet's, that of the host.
func nodeName(cfg Config) string {
	host, _ := os.Hostname()
	return cmp.Or(cfg.NodeName, strings.ToLower(host))
}

// offers makes the device plugin; nil: kubelet is offered nothing.
func (a *Agent) offers() *deviceplugin.Plugin {
	if a.cfg.KubeletDir == "" {
		return nil
	}
	last := make(map[string]map[string]uint64) // by feature
	return deviceplugin.New(deviceplugin.Config{
		Dir: filepath.Join(a.cfg.KubeletDir, "device-plugins"), Domain: policy.RequestDomain, Log: a.log,
		Amounts: func() map[string]int {
			amounts := make(map[string]int)
			for _, w := range a.workers {
				g, ok := w.feature.(feature.Guarantor)
				if !ok {
					continue
				}
				// One that hangs keeps what it guarantees.
				if all, ok := readBy(w.guarantees, g.Guarantees); ok {
					last[w.feature.Name()] = maps.Clone(all)
				}
				for resource, n := range last[w.feature.Name()] {
					amounts[resource] = int(min(n, mostDevices))
				}
			}
			return amounts
		},
	})
}

// offered returns a finding for each resource that kubelet is offered.
func offered(p *deviceplugin.Plugin) (list []probe.Finding) {
	if p == nil {
		return nil
	}
	for _, o := range p.Offers() {
		v := probe.Verdict{Level: probe.Full}
		switch {
		case o.Err != nil:
			v = probe.Verdict{Level: probe.Degraded, Why: o.Err.Error(), Mend: "see kubelet's log; it is asked again every second"}
		case !o.Watched:
			v = probe.Verdict{Level: probe.Degraded, Why: "kubelet has not asked for it: pods that request it are not placed here", Mend: "start kubelet, or give the agent its directory by --kubelet-dir"}
		}
		list = append(list, probe.Finding{Capability: o.Resource, Area: "kubelet", Verdict: v, Detail: fmt.Sprint(o.Amount)})
	}
	return list
}
