package fleet

import (
	"fmt"
	"strings"
	"testing"
)

// requests has pods that ask for 400 of a node's 950 Mbit/s: the scheduler finds room for two on
// each node, and none for a fifth.
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
	f.awaitRunning(t, "share-1", "share-2", "share-3", "share-4")
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
	f.run(t, pods[4])
	await(t, "the scheduler to refuse the fifth", func() error {
		out, err := f.Kubectl(t.Context(), "get", "pod", "--namespace=shop", "share-5", "-o", "jsonpath={.status.phase} {.status.conditions[*].message}")
		if err == nil && (!strings.HasPrefix(out, "Pending ") || !strings.Contains(out, "Insufficient fairlead.dev/egress-mbit")) {
			err = fmt.Errorf("it is %q", out)
		}
		return err
	})
}
