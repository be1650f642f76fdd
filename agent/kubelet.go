package agent

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/agent/deviceplugin"
	"github.com/fairlead-project/fairlead/discover"
	"github.com/fairlead-project/fairlead/discover/kubernetes"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/policy"
)

// mostDevices bounds the devices of one resource. docs/kubernetes.md states what they cost kubelet.
const mostDevices = 10_000

// pods returns the sources of what Kubernetes knows about pods.
func pods(cfg Config) (sources []discover.PodSource) {
	if cfg.KubeletDir != "" {
		sources = append(sources, kubernetes.Kubelet{
			Socket: filepath.Join(cfg.KubeletDir, "pod-resources", "kubelet.sock"), Domain: policy.RequestDomain,
		})
	}
	if cfg.Kubeconfig != "" {
		host, _ := os.Hostname() // kubelet's default
		sources = append(sources, kubernetes.APIServer{Kubeconfig: cfg.Kubeconfig, Node: cmp.Or(cfg.NodeName, strings.ToLower(host))})
	}
	return sources
}

// offers makes the device plugin; nil if kubelet is offered nothing.
func (a *Agent) offers() *deviceplugin.Plugin {
	if a.cfg.KubeletDir == "" {
		return nil
	}
	return deviceplugin.New(deviceplugin.Config{
		Dir: filepath.Join(a.cfg.KubeletDir, "device-plugins"), Domain: policy.RequestDomain, Log: a.log,
		Amounts: func() map[string]int {
			for _, w := range a.workers {
				if g, ok := w.feature.(feature.Guarantor); ok {
					a.guaranteed.ask(w, g, a.pace.now())
				}
			}
			return a.guaranteed.amounts()
		},
	})
}

// keepTime is how long the last known amount counts while a feature cannot determine it. kubelet
// waits as long for a plugin that has gone. Without it, one failed listing of devices would make
// kubelet withdraw all of them from the scheduler.
const keepTime = 5 * time.Minute

// guaranteed holds how much all containers together can be guaranteed, by feature and resource.
type guaranteed struct {
	mu sync.Mutex
	by map[string]map[string]guarantee
}

type guarantee struct {
	amount uint64
	known  time.Time
	why    error // why it is unknown now: amount is then that of known
}

// ask updates the amounts that a feature guarantees.
func (g *guaranteed) ask(w *worker, of feature.Guarantor, now time.Time) {
	type answer struct {
		all map[string]uint64
		err error
	}
	got, err := readBy(w.fence, "guarantees", func() (a answer) { a.all, a.err = of.Guarantees(); return a })
	if err != nil {
		got.err = fmt.Errorf("%s: %w", w.feature.Name(), err)
	}
	next := make(map[string]guarantee)
	for resource, amount := range got.all {
		next[resource] = guarantee{amount, now, nil}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for resource, last := range g.by[w.feature.Name()] {
		if _, known := next[resource]; known {
			continue
		}
		if last.why = got.err; last.why == nil || now.Sub(last.known) > keepTime {
			last.amount = 0
		}
		next[resource] = last
	}
	if g.by == nil {
		g.by = make(map[string]map[string]guarantee)
	}
	g.by[w.feature.Name()] = next
}

// amounts returns how many devices to offer kubelet, by resource.
func (g *guaranteed) amounts() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	amounts := make(map[string]int)
	for _, of := range g.by {
		for resource, last := range of {
			amounts[resource] = int(min(last.amount, mostDevices))
		}
	}
	return amounts
}

// why returns why the amount of a resource is unknown; nil if it is known.
func (g *guaranteed) why(resource string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, of := range g.by {
		if last := of[resource]; last.why != nil {
			return fmt.Errorf("%w; it was last known at %s, and counts for %v", last.why, last.known.Format(time.TimeOnly), keepTime)
		}
	}
	return nil
}

// offered returns a finding for each resource offered to kubelet.
func offered(p *deviceplugin.Plugin, g *guaranteed, plugged *fence) (list []probe.Finding) {
	if p == nil {
		return nil
	}
	if plugged.unavailable() != "" {
		return []probe.Finding{{Capability: policy.RequestDomain + policy.ResourceEgress, Area: "kubelet", Verdict: plugged.verdict(nil)}}
	}
	offers := p.Offers()
	if len(offers) == 0 {
		return []probe.Finding{{Capability: policy.RequestDomain + policy.ResourceEgress, Area: "kubelet", Verdict: probe.Verdict{
			Level: probe.Degraded, Why: "kubelet is offered nothing: the rate of an uplink is not known, and no disk of known capacity is named",
			Mend: "give the agent the rate of each uplink by --uplink eth0=1gbit, or a disk by --kubelet-disk",
		}}}
	}
	for _, o := range offers {
		v := probe.Verdict{Level: probe.Full}
		unknown := g.why(strings.TrimPrefix(o.Resource, policy.RequestDomain))
		switch {
		case o.Err != nil:
			v = probe.Verdict{Level: probe.Degraded, Why: o.Err.Error(), Mend: "see kubelet's log; it is asked again every second"}
		case unknown != nil:
			v = probe.Verdict{Level: probe.Degraded, Why: unknown.Error(), Mend: "give the agent the rate of each uplink by --uplink eth0=1gbit, or see that the disk is there"}
		case !o.Watched:
			v = probe.Verdict{Level: probe.Degraded, Why: "kubelet has not asked for it: pods that request it are not placed here", Mend: "start kubelet, or give the agent its directory by --kubelet-dir"}
		}
		list = append(list, probe.Finding{Capability: o.Resource, Area: "kubelet", Verdict: v, Detail: fmt.Sprint(o.Amount)})
	}
	return list
}
