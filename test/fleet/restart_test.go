package fleet

import (
	"encoding/json"
	"strings"
	"testing"
)

// restart has Kubernetes replace the agents while a pod sends as much as it may. What is in force is
// never gone for more than a second.
func (f *fleet) restart(t *testing.T) {
	const ceil = 50e6 // bit/s
	f.run(t, pod{name: "sink", node: "n2", command: []string{"fairlead-lab", "load", "tcp-recv", "--listen=:9000"}})
	address := f.awaitRunning(t, "sink")
	f.run(t, pod{name: "limited", node: "n1", annotations: map[string]string{"kubernetes.io/egress-bandwidth": "50M"},
		command: []string{"fairlead-lab", "load", "tcp-send", "--every=200ms", "--to=" + address + ":9000"}})
	f.awaitRunning(t, "limited")
	a := f.agent(t, f.Nodes[0])
	await(t, "the limit to be in force", func() error {
		_, err := inForce(t, a, "shop/limited/main", "traffic")
		return err
	})
	sum := f.measure(t, "limited", 10)
	if sum.BitRate < ceil/2 || sum.BitRate > 1.2*ceil {
		t.Fatalf("it sends %.1f Mbit/s, want about %.0f", sum.BitRate/1e6, ceil/1e6)
	}
	log := func() []string { return strings.Split(f.kubectl(t, "logs", "--namespace=shop", "limited"), "\n") }
	before := len(log())
	f.kubectl(t, "rollout", "restart", "--namespace=fairlead-system", "daemonset/fairlead")
	f.kubectl(t, "rollout", "status", "--namespace=fairlead-system", "daemonset/fairlead", "--timeout=120s")
	f.measure(t, "limited", 10)
	beyond, windows := 0, 0
	for _, line := range log()[before:] {
		var w window
		if json.Unmarshal([]byte(line), &w) != nil {
			continue // the end of the log
		}
		windows++
		if w.BitRate > 2*ceil {
			beyond++
			t.Logf("%.0f Mbit/s in a fifth of a second", w.BitRate/1e6)
		}
	}
	t.Logf("beyond the limit in %d of %d fifths of a second", beyond, windows)
	if beyond > 5 {
		t.Errorf("the limit was not in force for %.1f s, want 1 s at most", float64(beyond)/5)
	}
}
