package network

import (
	"fmt"
	"slices"

	"github.com/fairlead-project/fairlead/hook"
	"github.com/fairlead-project/fairlead/kernel/qdisc"
)

// Mode is how packets reach a container.
type Mode string

// The modes.
const (
	Peer Mode = "peer" // into its device, bypassing the host end
	End  Mode = "end"  // by the host end, through all its hooks
	Slow Mode = "slow" // by the kernel's own path
)

// EndState is the state of a container's device and of its host end.
type EndState struct {
	Kind     string      // of the container's device
	Ether    bool        // it has Ethernet headers
	Trusted  bool        // the namespace of the host end was not created by a container
	Host     qdisc.State // of the host end
	Master   qdisc.State // of the host end's bridge
	Bridge   int         // index of that bridge; 0: none
	Threaded bool        // NAPI threads poll the container's device
	XDP      bool        // it has an XDP program
	MTU      int         // the lowest of the container's device, the host end and that bridge
	Watched  bool        // a feature observes packets at the container's device

	// Names of our programs at the host end: Send takes packets away, at ingress; Arrive learns from
	// packets that arrive, at egress.
	Send, Arrive string
}

// Ways is the path of packets to a container, and whether the fast path may take packets from it.
type Ways struct {
	In     Mode
	WhyIn  Reason // why it is not Peer
	Out    bool
	WhyOut Reason // why packets may not leave by the fast path
}

// Way decides on the paths. Packets must not bypass anything: where something is in place, they go by
// End, through all hooks of the host end, or by the slow path.
func Way(e EndState) Ways {
	if r, ok := e.neither(); ok {
		return Ways{In: Slow, WhyIn: r, WhyOut: r}
	}
	w := Ways{In: Peer, Out: true}
	if r, ok := e.notPeer(); ok {
		w.In, w.WhyIn = End, r
	}
	if r, ok := e.slowOut(); ok {
		w.Out, w.WhyOut = false, r
	}
	return w
}

// neither returns a reason against both directions.
func (e EndState) neither() (Reason, bool) {
	switch {
	case e.Kind != "veth" && e.Kind != "netkit":
		return Reason{Kind, fmt.Sprintf("the container's device is of kind %s: a veth has a host end that packets can be taken from", e.Kind)}, true
	case !e.Trusted:
		return Reason{Untrusted, "the namespace of its host end may have been made by a container"}, true
	case !e.Ether:
		return Reason{Kind, "the container's device has no Ethernet: make the netkit in mode l2"}, true
	case shapes(e.Master.Root):
		return Reason{Shaped, fmt.Sprintf("the bridge has the qdisc %s, which packets would not meet: remove it", e.Master.Root)}, true
	}
	for _, p := range slices.Concat(e.Master.Ingress, e.Master.Egress) {
		if !p.Ours {
			return Reason{Filtered, fmt.Sprintf("the bridge has %s, which packets would not meet: remove it", text(p))}, true
		}
	}
	return Reason{}, false
}

// notPeer returns why packets must not bypass the host end.
func (e EndState) notPeer() (Reason, bool) {
	if shapes(e.Host.Root) {
		return Reason{Shaped, fmt.Sprintf("the host end has the qdisc %s: packets go through it", e.Host.Root)}, true
	}
	switch {
	case e.Threaded:
		return Reason{Thread, "a thread polls the container's device: packets go to it"}, true
	case e.XDP:
		return Reason{XDP, "the container's device has an XDP program: packets go to it"}, true
	case e.Watched:
		return Reason{Watched, "packets are looked at as they come to the container's device: they go that way"}, true
	}
	for _, p := range e.Host.Egress {
		if p.Ours && p.Name == e.Arrive {
			continue
		}
		if p.Ours {
			return Reason{Filtered, fmt.Sprintf("fairlead has its program %q at the host end: packets go through it", p.Name)}, true
		}
		return Reason{Filtered, fmt.Sprintf("the host end has %s: packets go through it", text(p))}, true
	}
	return Reason{}, false
}

// slowOut returns why packets must not be taken away at the host end.
func (e EndState) slowOut() (Reason, bool) {
	for _, p := range e.Host.Ingress {
		if p.Ours && p.Stage == hook.Ceil {
			return Reason{Shaped, "its net.ceil leads what it sends through a queue of its own before: without net.ceil it is accelerated"}, true
		}
	}
	if who := behind(e.Host.Ingress, e.Send); who != "" {
		return Reason{Filtered, fmt.Sprintf("the host end has %s, which packets would not meet: remove it, or attach it by tcx", who)}, true
	}
	return Reason{}, false
}
