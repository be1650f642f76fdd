package traffic

import (
	"errors"
	"path/filepath"
	"strconv"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// deviceBytes is the metric that Export adds.
const deviceBytes = "traffic_device_bytes_total"

// Export implements feature.Exporter: what the devices of all containers have sent and received,
// also of those without policy. Of containers that share a network, the first answers for all.
func (f *Traffic) Export() feature.Snapshot {
	s := feature.Snapshot{Taken: f.cfg.Now(), Help: map[string]string{
		deviceBytes: "Bytes that a device of the container has sent (egress) or received (ingress), as the kernel counts at it, the overlay's fast path included.",
	}}
	if f.cfg.Containers == nil {
		return s
	}
	f.spaces(func(c container.Container, ns *netdev.NS) {
		for device, n := range f.bytesOf(c, ns) {
			add := func(way Direction, bytes uint64) {
				s.Samples = append(s.Samples, feature.Sample{
					Container: c.ID, Name: deviceBytes, Device: device, Value: float64(bytes),
					Labels: []feature.Label{{Name: "direction", Value: string(way)}},
				})
			}
			add(Egress, n.TxBytes)
			add(Ingress, n.RxBytes)
		}
	})
	return s
}

// spaces calls fn for each container with a network of its own; of those that share one, for the
// first.
func (f *Traffic) spaces(fn func(container.Container, *netdev.NS)) {
	seen := make(map[uint64]bool)
	for _, c := range f.cfg.Containers.Running() {
		if c.HostNetwork || c.NetNS == 0 || seen[c.NetNS] {
			continue
		}
		seen[c.NetNS] = true
		ns, err := f.find.Open(filepath.Join(f.cfg.Roots.Proc, strconv.Itoa(c.PID), "ns", "net"), c.NetNS)
		if err != nil {
			continue // it has ended
		}
		fn(c, ns)
		ns.Close()
	}
}

// bytesOf returns what the devices of a container count, by the name of the host end, or by the kind
// of a device without one: a container may rename its own devices again and again. It reads them at
// the container's side, because what bpf_redirect_peer hands over does not pass the host end.
func (f *Traffic) bytesOf(c container.Container, ns *netdev.NS) map[string]netdev.Counters {
	all, err := ns.AllCounters(mostOwn)
	if err != nil && !errors.Is(err, netdev.ErrMany) {
		return nil
	}
	of := make(map[string]netdev.Counters)
	for _, e := range c.Ends(f.cfg.Roots.Proc) {
		if !leadsOut(e) {
			continue
		}
		n, ok := all[e.Inside.Index]
		if !ok {
			continue // it has gone
		}
		name := e.Inside.Kind
		if e.Host {
			name = e.Name
		}
		sum := of[name]
		sum.TxBytes, sum.RxBytes = sum.TxBytes+n.TxBytes, sum.RxBytes+n.RxBytes
		of[name] = sum
	}
	return of
}

// leadsOut reports whether a device leads to the host: it has a host end where no container can have
// made it, or is on top of a device outside. A container may have made any other.
func leadsOut(e container.End) bool {
	return e.Host && e.Trusted || unseen(e.Inside.Kind) && e.Inside.Apart
}
