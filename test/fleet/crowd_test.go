package fleet

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/test/kubernetes"
)

// crowd fills a node with 110 pods, kubelet's default limit. The agent must be small beside them,
// and the policy of one more must be in force at once.
func (f *fleet) crowd(t *testing.T) {
	const pods = 110
	n := f.Nodes[0]
	var all []pod
	there := strings.Fields(f.kubectl(t, "get", "pods", "--all-namespaces", "--field-selector=spec.nodeName="+n.Name, "-o", "name"))
	for i := range pods - len(there) - 1 {
		all = append(all, pod{name: fmt.Sprint("crowd-", i), node: n.Name, request: "1m"})
	}
	f.run(t, all...)
	a := f.agent(t, n)
	await(t, "the crowd to be known", func() error {
		list, err := a.Containers(t.Context())
		known := 0
		for _, c := range list {
			if strings.HasPrefix(c.Name, "shop/crowd-") {
				known++
			}
		}
		if err == nil && known != len(all) {
			err = fmt.Errorf("%d of %d are", known, len(all))
		}
		return err
	})
	const window = 30 * time.Second
	pid := f.agentPID(t, n)
	time.Sleep(window / 3)
	before, begin := testkit.CPUTime(t, pid), time.Now()
	time.Sleep(window)
	cpu := float64(testkit.CPUTime(t, pid)-before) / float64(time.Since(begin))
	memory := testkit.Resident(t, pid)
	t.Logf("beside %d pods: %.2f %% of a CPU, %.1f MB", pods-1, 100*cpu, memory/1e6)
	if cpu > 0.015 {
		t.Errorf("the agent took %.2f %% of a CPU, want 1.5 at most", 100*cpu)
	}
	if memory > 80e6 {
		t.Errorf("the agent has %.1f MB, want 80 at most", memory/1e6)
	}

	for _, policy := range []struct{ feature, annotation, value string }{
		{"traffic", "kubernetes.io/egress-bandwidth", "50M"}, {"netcpu", "fairlead.netcpu", "isolate"},
	} {
		t.Run(policy.feature, func(t *testing.T) {
			f.run(t, pod{name: "late", node: n.Name, annotations: map[string]string{policy.annotation: policy.value}, request: "1m"})
			late := inForce(t, a, "shop/late/main", policy.feature)
			for _, s := range late.Features {
				if took := s.Since.Sub(late.Started); s.Feature == policy.feature {
					t.Logf("in force after %v", took)
					if took > 500*time.Millisecond {
						t.Errorf("%s was in force %v after the start of the container, want 500 ms at most", policy.feature, took)
					}
				}
			}
		})
	}
}

// agentPID returns the process of the agent's container on a node.
func (f *fleet) agentPID(t *testing.T, n *kubernetes.Node) int {
	t.Helper()
	list, err := f.agent(t, n).Containers(t.Context())
	for _, c := range list {
		if strings.HasPrefix(c.Name, "fairlead-system/") && strings.Contains(c.Cgroup.V2, n.CgroupRoot()) {
			return c.PID
		}
	}
	t.Fatalf("no agent on %s: %v", n.Name, err)
	return 0
}
