package fleet

import (
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead-project/fairlead/api"
)

// requests creates pods that request 400 of a node's 950 Mbit/s: the scheduler must find room for
// two on each node, and none for a fifth.
func (f *fleet) requests(t *testing.T) {
	var pods []pod
	for i := range 5 {
		pods = append(pods, pod{name: fmt.Sprint("share-", i+1), limits: map[string]string{"fairlead.dev/egress-mbit": "400"}})
	}
	for _, n := range f.Nodes {
		await(t, "bandwidth of "+n.Name+" to be offered", func() error {
			out, err := f.Kubectl(t.Context(), "get", "node", n.Name, "-o", `jsonpath={.status.allocatable.fairlead\.dev/egress-mbit}`)
			if err == nil && out != "950" {
				err = fmt.Errorf("it is %q Mbit/s, want 950", out)
			}
			return err
		})
	}
	f.run(t, pods[:4]...)
	for _, n := range f.Nodes {
		out := f.kubectl(t, "get", "pods", "--namespace=shop", "--field-selector=spec.nodeName="+n.Name, "-o", "name")
		if got := strings.Count(out, "pod/share-"); got != 2 {
			t.Errorf("%d of the pods are on %s, want 2", got, n.Name)
		}
		a := f.agent(t, n)
		await(t, "the requests to be policy on "+n.Name, func() error {
			list, err := a.Containers(t.Context())
			granted := 0
			for _, c := range list {
				for _, s := range c.Policy {
					if strings.HasPrefix(c.Name, "shop/share-") && s.Key == "fairlead.net.rate" && s.From == "request of fairlead.dev/egress-mbit" {
						granted++
					}
				}
			}
			if err == nil && granted != 2 {
				err = fmt.Errorf("%d pods have a rate, want 2: %+v", granted, list)
			}
			return err
		})
	}
	f.apply(t, pods[4])
	await(t, "the scheduler to refuse the fifth", func() error {
		out, err := f.Kubectl(t.Context(), "get", "pod", "--namespace=shop", "share-5", "-o", "jsonpath={.status.phase} {.status.conditions[*].message}")
		if err == nil && (!strings.HasPrefix(out, "Pending ") || !strings.Contains(out, "Insufficient fairlead.dev/egress-mbit")) {
			err = fmt.Errorf("it is %q", out)
		}
		return err
	})
}

// contention makes two pods that request 400 of a node's 950 Mbit/s send beside one that requests
// nothing and sends by many connections.
func (f *fleet) contention(t *testing.T) {
	const rate, mtu, payload = 400e6, 1450, 1398 // of a TCP packet with timestamps
	to := "--to=" + f.run(t, pod{name: "sink", node: "n2", command: []string{"fairlead-lab", "load", "tcp-recv"}}) + ":9000"
	send := []string{"fairlead-lab", "load", "tcp-send", "--every=1s", to}
	ask := map[string]string{"fairlead.dev/egress-mbit": "400"}
	f.run(t,
		pod{name: "left", node: "n1", limits: ask, command: send},
		pod{name: "right", node: "n1", limits: ask, command: send},
		pod{name: "greedy", node: "n1", command: append(send, "--conns=16")})
	a := f.agent(t, f.Nodes[0])
	for _, name := range []string{"left", "right"} {
		inForce(t, a, "shop/"+name+"/main", "traffic")
	}
	f.measure(t, "greedy", 3)
	for _, name := range []string{"left", "right", "greedy"} {
		got := f.measure(t, name, 10).BitRate
		t.Logf("%s: %.1f Mbit/s of payload", name, got/1e6)
		if name != "greedy" && got < 0.97*rate*payload/mtu {
			t.Errorf("%s has %.1f Mbit/s of payload, want %.1f at least", name, got/1e6, 0.97*rate*payload/mtu/1e6)
		}
	}
}

// inForce waits until a feature is done for a container, and returns its status.
func inForce(t *testing.T, a *api.Client, name, feature string) (found api.Container) {
	t.Helper()
	await(t, feature+" of "+name+" to be in force", func() error {
		list, err := a.Containers(t.Context())
		for _, c := range list {
			for _, s := range c.Features {
				if c.Name == name && s.Feature == feature && s.State == api.StateDone {
					found = c
					return nil
				}
			}
		}
		return fmt.Errorf("%+v, %w", list, err)
	})
	return found
}
