package hook

import "github.com/fairlead-project/fairlead/kernel/qdisc"

// The stages of the programs at one hook. Programs run in the order of their stages, whichever was
// attached first. Kernels with tcx and older ones, which have filters, keep the same order
// (kernel/qdisc).
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
// A packet that a program drops or redirects skips all later programs at the hook, including those of
// other software. A redirect skips more:
//
//   - to an IFB: the rest of this hook. The packet comes back from the IFB as received,
//     but skips the hook (skb->tc_skip_classify). So what Ceil takes never gets to
//     Redirect.
//   - to an uplink: routing, netfilter, and every program at the devices in between. The
//     uplink's egress hook and its qdisc see the packet.
//   - into a container (bpf_redirect_peer): the host end's egress hook, with Learn and
//     Count, and its qdisc, which holds the container to its ceil.
//
// So a program that redirects comes last, and does itself what it skips, or leaves the packet to
// the stack. It reports to netcpu's accounts (bpf/fate.h) what it drops for a container or hands
// over into one, because they see the packet nowhere else. The stages from Count on run after the
// programs of other software, so what those drop is not counted as delivered.
const (
	Stamp    qdisc.Stage = iota // notes the sender in the packet
	Identify                    // gives the packet its tenant's class
	Drop                        // drops what its container cannot take
	Learn                       // learns from the packet which container its flow belongs to
)

// The stages after the programs of other software.
const (
	Count    = qdisc.Others + iota // counts what is delivered, and drops what is beyond a limit
	Observe                        // looks at packets that have passed all of these; changes nothing
	Ceil                           // leads packets through the queue of an IFB
	Redirect                       // takes a shorter way than the stack's
)
