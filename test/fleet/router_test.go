package fleet

import (
	"fmt"
	"testing"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
)

// noStranger lets only one pod connect to another.
const noStranger = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: no-stranger, namespace: shop}
spec:
  podSelector: {matchLabels: {app: server}}
  ingress: [{from: [{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [stranger]}]}}]}]
`

// router makes kube-router create netfilter rules for a NetworkPolicy, for a pod with a ceil,
// isolate and the short path of the overlay. All of them must stay in force together.
func (f *fleet) router(t *testing.T) {
	const ceil = 50e6 // bit/s
	// Not net.ceil: its queue takes sent packets off the short path.
	server := f.run(t, pod{name: "server", node: "n1", annotations: map[string]string{"fairlead.net.ingress.ceil": "50mbit", "fairlead.netcpu": "isolate"},
		command: []string{"sh", "-c", "fairlead-lab load rr-server --proto=tcp & exec fairlead-lab load tcp-recv --every=1s --listen=:9001"}})
	ask := []string{"fairlead-lab", "load", "rr-client", "--proto=tcp", "--rate=100", "--every=1s", "--to=" + server + ":9000"}
	f.run(t, pod{name: "source", node: "n2", command: []string{"fairlead-lab", "load", "tcp-send", "--to=" + server + ":9001"}},
		pod{name: "client", node: "n2", command: ask}, pod{name: "stranger", node: "n2", command: append(ask, "--connect")})
	a := f.agent(t, f.Nodes[0])
	overlay := api.SetRequest{Set: map[string]string{"overlay": "on"}}
	await(t, "the server to be known", func() error { _, err := a.Set(t.Context(), "shop/server", overlay); return err })
	for _, n := range f.Nodes {
		testkit.Must(t, n.StartRouter())
	}

	all := func(stranger bool) {
		t.Helper()
		await(t, fmt.Sprintf("the stranger's connections to be accepted: %v", stranger), func() error {
			list := f.windows(t, "stranger")
			if n := len(list); n == 0 || list[n-1].Ops > 0 != stranger {
				return fmt.Errorf("answers in each second: %.0f", list)
			}
			return nil
		})
		for _, feature := range []string{"traffic", "netcpu", "overlay"} {
			inForce(t, a, "shop/server/main", feature)
		}
		before, err := a.Overlay(t.Context(), "shop/server", 0)
		testkit.Must(t, err)
		await(t, "packets of both ways by the short path", func() error {
			now, err := a.Overlay(t.Context(), "shop/server", 0)
			for _, c := range now.After(before).Containers {
				for _, end := range c.Ends {
					if end.Egress.Fast > 0 && end.Ingress.Fast > 0 {
						return nil
					}
				}
			}
			return fmt.Errorf("%+v, %w", now.Containers, err)
		})
		if got := f.measure(t, "server", 5).BitRate; got < ceil/2 || got > 1.2*ceil {
			t.Errorf("it receives %.1f Mbit/s, want about %.0f", got/1e6, ceil/1e6)
		}
		if got := f.measure(t, "client", 1).Ops; got == 0 {
			t.Error("the client gets no answers")
		}
	}
	all(true)
	testkit.Must(t, f.Apply(t.Context(), noStranger))
	all(false)
	f.kubectl(t, "delete", "networkpolicy", "--namespace=shop", "no-stranger")
	all(true)
}
