package testkit

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// The overlay network of [StartSwarm], which any container may join.
const (
	SwarmNetwork = "flover"
	SwarmSubnet  = "10.216.0.0/24"
)

// StartSwarm joins two engines, as two hosts on one wire (flwire, 10.214.0.1 and .2), to a Swarm
// with an overlay network. It skips t where [StartDocker] does.
func StartSwarm(t testing.TB) [2]*Docker {
	t.Helper()
	NeedRoot(t)
	ns := [2]*NS{NetNS(t), NetNS(t)}
	Veth(t, ns[0], "flwire", ns[1], "flwire")
	var engines [2]*Docker
	for i, ns := range ns {
		h := ns.Handle(t)
		wire, err := h.LinkByName("flwire")
		Must(t, err)
		addr, err := netlink.ParseAddr(fmt.Sprintf("10.214.0.%d/24", i+1))
		Must(t, err)
		Must(t, h.AddrAdd(wire, addr))
		engines[i] = StartDockerIn(t, ns)
	}
	engines[0].Must(t, "swarm", "init", "--advertise-addr", "10.214.0.1")
	token := engines[0].Must(t, "swarm", "join-token", "-q", "worker")
	// After 20 seconds Docker reports that it continues to join in the background.
	_, err := engines[1].Run("swarm", "join", "--token", token, "--advertise-addr", "10.214.0.2", "10.214.0.1:2377")
	for end := time.Now().Add(2 * patience); ; time.Sleep(100 * time.Millisecond) {
		state, stateErr := engines[1].Run("info", "--format", "{{.Swarm.LocalNodeState}}")
		if stateErr == nil && state == "active" {
			break
		}
		if time.Now().After(end) || err != nil && !strings.Contains(err.Error(), "Timeout was reached") {
			t.Fatalf("join: %v; then it is %q, %v", err, state, stateErr)
		}
	}
	for _, d := range engines {
		d.AwaitGateway(t)
	}
	engines[0].Must(t, "network", "create", "-d", "overlay", "--attachable", "--subnet", SwarmSubnet, SwarmNetwork)
	return engines
}

// AwaitGateway waits until an engine in a Swarm has connected the Swarm's sandbox to docker_gwbridge.
// It does so after it has joined, and the bridge then has the offloads of its port only.
func (d *Docker) AwaitGateway(t testing.TB) {
	t.Helper()
	h := d.NS.Handle(t)
	Await(t, "docker_gwbridge has a port", func() bool {
		bridge, err := h.LinkByName("docker_gwbridge")
		return err == nil && bridge.Attrs().OperState == netlink.OperUp
	})
}
