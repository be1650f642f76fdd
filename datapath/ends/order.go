package ends

import "github.com/fairlead-project/fairlead/kernel/qdisc"

// The stages of the programs at one hook. A program runs behind those of the stages
// before its own, whichever was attached first: this is the order on kernels with
// tcx, by anchors, and on older ones, by preferences of filters.
//
//	hook                  stages, and who has a program there
//	host end, ingress     Stamp netcpu's accounts, Identify traffic, Ceil traffic: redirects to an IFB
//	host end, egress      Learn traffic, Count netcpu's early drop
//	uplink, ingress       Drop netcpu, Ceil traffic: redirects to an IFB
//	uplink, egress        Identify traffic
//	macvlan, ingress      Learn traffic, in the container's own namespace
//
// The host end is that of a container's veth; it receives what the container sends.
//
// A program that drops or redirects a packet keeps it from all that come behind it,
// programs of others included, and a redirect keeps it from more:
//
//   - to an IFB: from this hook altogether, as the packet comes back behind it
//     (skb->tc_skip_classify, and from_ingress). What is led through the IFB of Ceil
//     never gets to Observe or Redirect of the same hook if they were behind it.
//   - to an uplink: from routing, netfilter, and every program at the ingress of the
//     devices in between. The uplink's egress hook and its qdisc see the packet.
//   - into a container (bpf_redirect_peer): from the host end's egress hook, with
//     Learn and Count, and from its qdisc, which holds the container to its ceil.
//
// So what redirects comes last, and does itself, or leaves to the slow path, what it
// skips. The stages from Count on come behind the programs of others: what those
// drop is not counted as delivered.
const (
	Stamp    qdisc.Stage = iota // notes in the packet who sent it
	Identify                    // gives the packet its tenant's class
	Drop                        // drops what its container cannot take
	Learn                       // learns from the packet whose its flow is
)

// The stages behind the programs of others.
const (
	Count    = qdisc.Others + iota // counts what is delivered; drops what nothing may wait for
	Observe                        // only looks at what has passed all of these
	Ceil                           // leads packets through the queue of an IFB
	Redirect                       // takes a shorter way than the stack's
)
