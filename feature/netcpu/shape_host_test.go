package netcpu_test

import (
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// Bulk TCP gets its super-packets back, and loses them to a flood at once.
func TestShapeFollowsTraffic(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	if got := h.state()["h0 tso"]; got != netdev.Off {
		t.Fatalf("tso of h0 is %q, want it off", got)
	}
	h.start(h.box, "tcp-recv", "--listen", ":9001")
	bulk := h.start(h.wire, "tcp-send", "--to", "10.66.0.2:9001", "--size", "65536")
	h.until("bulk TCP alone", netdev.TSO.On())
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "60000")
	h.until("a flood beside it", netdev.Off)
	if bulk.Read().Since(load.Reading{}).Bytes == 0 {
		t.Error("no bytes of TCP were sent")
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}

// Requests that a neighbour receives in the client's own time take no thread, until others' time is
// taken; that ends at once.
func TestShapeFollowsSenders(t *testing.T) {
	h := newHost(t, sandbox.CPU{})
	client := h.create(sandbox.Spec{Name: "client"})
	h.Join(client, "10.66.0.3/24", h.ns, "h1")
	neighbour := h.Describe(client)
	neighbour.Interfaces = []container.Interface{h.Veth(client, "eth0", h.ns, "h1")}
	h.apply(neighbour, policy.NetCPUObserve)
	h.apply(h.container, policy.NetCPUIsolate)
	h.start(h.box, "rr-server", "--proto", "tcp", "--listen", ":9002")
	asked := h.start(client, "rr-client", "--proto", "tcp", "--to", "10.66.0.2:9002", "--size", "64")
	h.until("requests alone", netdev.TSO.On())
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "60000")
	h.until("a flood beside them", netdev.Off)
	if asked.Read().Since(load.Reading{}).Ops == 0 {
		t.Error("nothing was asked")
	}
	must(t, h.netcpu.Remove(t.Context(), h.container.ID))
	must(t, h.netcpu.Remove(t.Context(), neighbour.ID))
	if left := h.notes(); len(left) != 0 {
		t.Errorf("journal: %+v", left)
	}
}

func (h *host) until(what, tso string) {
	h.t.Helper()
	for end := time.Now().Add(90 * time.Second); h.state()["h0 tso"] != tso; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			h.t.Fatalf("%s: tso of h0 is still %q", what, h.state()["h0 tso"])
		}
	}
}
