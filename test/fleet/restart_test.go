package fleet

import "testing"

// restart makes Kubernetes replace the agents while a pod sends as much as it may. What is in force
// must never be gone for more than a second.
func (f *fleet) restart(t *testing.T) {
	const ceil = 50e6 // bit/s
	address := f.run(t, pod{name: "sink", node: "n2", command: []string{"fairlead-lab", "load", "tcp-recv"}})
	f.run(t, pod{name: "limited", node: "n1", annotations: map[string]string{"kubernetes.io/egress-bandwidth": "50M"},
		command: []string{"fairlead-lab", "load", "tcp-send", "--every=200ms", "--to=" + address + ":9000"}})
	inForce(t, f.agent(t, f.Nodes[0]), "shop/limited/main", "traffic")
	if got := f.measure(t, "limited", 10).BitRate; got < ceil/2 || got > 1.2*ceil {
		t.Fatalf("it sends %.1f Mbit/s, want about %.0f", got/1e6, ceil/1e6)
	}
	before := len(f.windows(t, "limited"))
	f.kubectl(t, "rollout", "restart", "--namespace=fairlead-system", "daemonset/fairlead")
	f.kubectl(t, "rollout", "status", "--namespace=fairlead-system", "daemonset/fairlead", "--timeout=120s")
	f.measure(t, "limited", 10)
	after, beyond := f.windows(t, "limited")[before:], 0
	for _, w := range after {
		if w.BitRate > 2*ceil {
			beyond++
			t.Logf("%.0f Mbit/s in a fifth of a second", w.BitRate/1e6)
		}
	}
	t.Logf("beyond the limit in %d of %d fifths of a second", beyond, len(after))
	if beyond > 5 {
		t.Errorf("the limit was not in force for %.1f s, want 1 s at most", float64(beyond)/5)
	}
}
