package traffic_test

import (
	"fmt"
	"maps"
	"testing"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// exported returns the bytes of a container's devices, as "veth1 egress".
func (h *host) exported(id container.ID) map[string]uint64 {
	h.t.Helper()
	all := make(map[string]uint64)
	for _, s := range h.traffic.Export().Samples {
		if s.Container == id {
			all[s.Device+" "+s.Labels[0].Value] = uint64(s.Value)
		}
	}
	return all
}

// The metrics page has the kernel's byte counts of a container's devices, exactly, and nothing of
// devices that lead nowhere or belong to the host, and nothing twice.
func TestDeviceBytes(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	h, box, c := newBridged(t)
	pod := c
	pod.ID += 1000
	forged := c.Interfaces[0]
	forged.Index, forged.Host.Name, forged.Host.Trusted = 1, "forged", false
	c.Interfaces = append(c.Interfaces, forged, container.Interface{Name: "eth1", Kind: "macvlan", Index: 1})
	h.containers = topology.Containers{c, pod, h.describe(h.ns)}
	h.start()

	const to = "10.66.0.1:9000"
	h.resolve(box, h.wire, to)
	sent := h.send(box, to)
	counted := func() map[string]uint64 {
		all, err := h.Open(h.ns).AllCounters(netdev.MostLinks)
		must(t, err)
		n := all[h.Index(h.ns, "hone")]
		return map[string]uint64{"hone egress": n.RxBytes, "hone ingress": n.TxBytes}
	}
	until(t, "the bytes of the container", func() (string, bool) { // protocols of the network may send meanwhile
		got, want := h.exported(c.ID), counted()
		return fmt.Sprintf("%v, want %v", got, want), maps.Equal(got, want)
	})
	if got := h.exported(c.ID)["hone egress"]; got < sent*100 {
		t.Errorf("%d bytes sent, want more than %d datagrams of 100 bytes", got, sent)
	}
	if all := h.traffic.Export().Samples; len(all) != 2 {
		t.Errorf("%+v, want one device of one container", all)
	}
}
