//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Whose packet is it? On the way out: each packet that a tenant sends is given the tenant's
 * slot where it enters the host, and at the uplink the slot is what chooses its
 * class: HTB and HFSC take skb->priority for one, without any filter (the CNid
 * of CNTC, section 3.1, without its patch).
 *
 * The identity travels in skb->priority as handle:slot. The kernel clears the
 * field when a packet leaves a container by a veth and keeps it through
 * bridges, tunnels (also those of another namespace) and, with
 * net.ipv4.ip_forward_update_priority at 0, through routing and NAT. A part of
 * the mark can carry it as well. Packets that did not come in by a device (of
 * containers in the host's namespace, of macvlan) are told by the cgroup of their
 * socket.
 *
 * On the way in nobody can tell at the uplink whose a packet will be: there may
 * be NAT, a tunnel, a proxy of addresses before it arrives. So it is learnt from
 * where packets do arrive. A packet of a flow that is not known is given a tag
 * of its flow for a priority, and passes as everybody's; where it is delivered
 * to a tenant the tag is read, and the next packet of that flow finds the
 * tenant's class. What a container says or sends teaches nothing.
 *
 * What a tenant has written into these fields itself is overwritten at the
 * host's end of its veth. Where there is no such end the socket that sent the
 * packet decides: one of a cgroup that is nobody's sends for nobody. A packet
 * without a socket, as one out of a tunnel is, is believed, but for while there
 * are macvlan devices (fl_strict).
 *
 * Hooks, and cost per event:
 *   tc ingress, host end of a tenant's veth
 *                     fl_identify   two stores at most; at egress, for a ceil
 *                     fl_lead       while it has a ceil: a queue, a tasklet, and
 *                                   the way into the host anew
 *   the queue of a ceil, below its lock: a filter of its root
 *                     fl_sort       its headers, the clock, an eight-byte store
 *   tc egress, uplinks
 *                     fl_normalise  for packets of a socket of this host up to nine
 *                                   look-ups of a hash and of an array
 *   tc ingress, uplinks, while what they receive is shared
 *                     fl_inbound    its headers, one look-up of a hash, two and the
 *                                   coarse clock in a flow's first tenth of a
 *                                   second; for the first of a flow a store
 *   where packets arrive: tc egress, host end of a tenant's veth, or tc
 *   ingress of its macvlan; for the sockets of a tenant in the host's namespace
 *   cgroup_skb ingress, its cgroup
 *                     fl_deliver,   a comparison; for the first of a flow a
 *                     fl_arrive     look-up and an update
 *
 * User space says in fl_cgroups (identity.h) whose a cgroup is; a full map is an error of
 * Apply, and the containers that are in it keep what they have. fl_flows
 * and fl_steady forget the flow that was not used for longest, which is learnt again with
 * its next packet. The programs no longer run once the agent has ended: then all packets
 * that are sent share the default class, and what is received is not led anywhere. Only
 * fl_sort stays, with its queue.
 */

#include "identity.h"
#include "kernel.h"
#include "map.h"
#include "parse.h"

#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* qdisc.Handle: "fl" */
#define HANDLE 0x666c0000U
#define MAJOR 0xffff0000U

/*
 * The priority of a received packet whose flow is not known: TAG, 20 bits of
 * the flow, and four bits of 0, which are a class to a qdisc that looks at no
 * others (pfifo_fast). It is never of our own major.
 */
#define TAG 0x66000000U
#define TAG_MASK 0xff00000fU
#define TAG_SHIFT 4
#define TAG_BITS 0xfffffU
#define OURS 0x6c000U /* the upper eight bits of it that would make HANDLE */

/* The tenant of a copy of fl_identify, fl_deliver or fl_arrive. */
volatile __u32 fl_slot SEC(".data.copy");

/* Packets that neither came in by a device nor have a socket are nobody's. */
volatile __u32 fl_strict;
/* Whether any cgroup has a class, and the levels at which such cgroups lie. */
volatile __u32 fl_levels;

#define MAX_LEVEL 8

/*
 * Slot of a tenant -> minor of the class for what its sockets send, for a while another
 * than its slot (reorder.go); 0: none. User space writes it.
 */
MAP(fl_classes, ARRAY, FL_MAX_TENANTS, __u32, __u32);

static __always_inline __u32 class_of(__u64 cgroup)
{
	__u32 tenant = fl_of_cgroup(cgroup), *class = bpf_map_lookup_elem(&fl_classes, &tenant);

	return class ? *class : 0;
}

SEC("tc")
int fl_identify(struct __sk_buff *skb)
{
	skb->priority = HANDLE | fl_slot;
	return TCX_NEXT; /* nothing is decided here: let the others see it */
}

/*
 * The class of the tenant whose socket sent it; 0 if the socket is nobody's, -1 if
 * there is none. A tenant's own cgroup may have further ones below.
 */
static __always_inline int of_socket(struct __sk_buff *skb)
{
	__u32 levels = fl_levels, class;
	__u64 id;
	int level;

	id = bpf_skb_cgroup_id(skb);
	if (!id) /* no socket, or one that has none: of a SYN, or in TIME_WAIT */
		return -1;
	if (!levels)
		return 0;
	class = class_of(id);
	if (class)
		return class;
#pragma unroll
	for (level = 1; level <= MAX_LEVEL; level++) {
		if (!(levels & 1U << level))
			continue;
		id = bpf_skb_ancestor_cgroup_id(skb, level);
		if (!id)
			break;
		class = class_of(id);
		if (class)
			return class;
	}
	return 0;
}

SEC("tc")
int fl_normalise(struct __sk_buff *skb)
{
	__u32 slot = (skb->priority & MAJOR) == HANDLE ? skb->priority & ~MAJOR : 0; /* that it carries */

	if (!skb->ingress_ifindex) {
		/* Of a socket here, of a macvlan, or out of a tunnel. */
		int told = of_socket(skb);

		if (told >= 0)
			slot = told; /* whatever it claims */
		else if (fl_strict)
			slot = 0;
	}
	if (slot)
		skb->priority = HANDLE | slot;
	else if ((skb->priority & MAJOR) == HANDLE || (skb->priority & TAG_MASK) == TAG)
		skb->priority = 0; /* goes into the default class */
	return TCX_NEXT; /* others' priorities mean nothing to our root, and something to them */
}

/* The IFB that a copy of fl_inbound or fl_lead leads packets to. */
volatile __u32 fl_ifb SEC(".data.copy");
/* What flows are mixed with, so that nobody can choose two that are one. */
const volatile __u64 fl_seed;
/* Goes up when a tenant ends: flows are learnt anew, as they may be another's. */
volatile __u32 fl_flow_epoch;

#define MAX_FLOWS 65536

struct place {
	__u32 slot;
	__u32 epoch;
	__u64 learnt; /* ns, by the coarse clock */
};
_Static_assert(sizeof(struct place) == 16, "no padding");

/* flow -> where it arrives */
MAP(fl_flows, LRU_HASH, MAX_FLOWS, __u64, struct place);

/*
 * The same of flows that go on for STEADY_NS (2Q: Johnson and Shasha, VLDB 1994). However
 * many new flows there are, such as a spray of single packets, they push none out of here
 * that sends but rarely.
 */
#define STEADY_NS 100000000ULL

MAP(fl_steady, LRU_HASH, MAX_FLOWS, __u64, struct place);

/*
 * Flows that are on their way to where they arrive, by the lower bits of their
 * tag. It takes microseconds; a flow that another has taken the place of is
 * learnt with its next packet.
 */
#define PENDING 65536

MAP(fl_pending, ARRAY, PENDING, __u32, __u64);

/*
 * At the host's end of a tenant's veth: the IFB holds what it sends to its ceil,
 * wherever it goes. The packet comes back as if it were received now. If the IFB
 * has gone it is dropped, as in fl_inbound.
 */
SEC("tc")
int fl_lead(struct __sk_buff *skb)
{
	return bpf_redirect(fl_ifb, 0);
}

/*
 * The queue of a ceil has two classes below the ceil: one for bulk, and one that is
 * served first, for flows that send little (sparse). Half of the ceil is each one's own
 * while both have packets, so that neither starves.
 *
 * A flow is sparse while it stays within a rate and a burst (the generic cell rate
 * algorithm, ITU-T I.371). Beyond that it is bulk until it has paused for as long as bulk
 * usually waits, so that its next packet does not overtake its last one.
 *
 * User space has the constants, of each queue: sparse.go. A flow of 0 (ARP, fragments,
 * ICMP that is no echo, ESP) is one like any other: neighbours are found while bulk waits,
 * and a flood of fragments is bulk and stays in order.
 */
volatile __u64 fl_cost SEC(".data.copy");  /* ns that COST_UNIT take at the rate of a sparse flow */
volatile __u64 fl_burst SEC(".data.copy"); /* ns that its burst takes at that rate */
volatile __u64 fl_pause SEC(".data.copy"); /* ns after which a flow of bulk is sparse again */

#define COST_UNIT 64 /* bytes: at 8 Tbit/s it is 1 ns */

/*
 * When the rate has caught up with what a flow has sent, ns. Two flows in one cell only make
 * each other bulk. With so many, the variables of a copy fill the page that they take anyway.
 * No other CPU writes meanwhile, as the queue is locked.
 */
#define CELLS 480

volatile __u64 fl_due[CELLS] SEC(".data.copy");

/* qdisc.MinorSparse and MinorDefault */
#define SPARSE_MINOR 0xfffdU
#define DEFAULT_MINOR 0xffffU

SEC("tc")
int fl_sort(struct __sk_buff *skb)
{
	__u32 syn, cell = fl_flow_of(skb, fl_seed, &syn) & 511;
	__u64 now = bpf_ktime_get_ns(), due;

	if (cell >= CELLS) /* the verifier of 6.1 knows no bound of a remainder or difference */
		cell &= 255;
	due = fl_due[cell];
	if (due < now)
		due = now;
	due += skb->len * fl_cost / COST_UNIT;
	if (due - now <= fl_burst) {
		fl_due[cell] = due;
		return HANDLE | SPARSE_MINOR;
	}
	fl_due[cell] = now + fl_burst + fl_pause;
	return HANDLE | DEFAULT_MINOR;
}

static __always_inline __u32 tag_of(__u64 flow)
{
	__u32 bits = flow & TAG_BITS;

	if ((bits & 0xff000) == OURS)
		bits ^= 0x80000;
	return TAG | bits << TAG_SHIFT;
}

static __always_inline void learn(__u64 flow, __u32 slot)
{
	struct place p = { .slot = slot, .epoch = fl_flow_epoch, .learnt = bpf_ktime_get_coarse_ns() };

	if (bpf_map_lookup_elem(&fl_steady, &flow)) /* BPF_EXIST would make room first */
		bpf_map_update_elem(&fl_steady, &flow, &p, BPF_ANY);
	else
		bpf_map_update_elem(&fl_flows, &flow, &p, BPF_ANY);
}

/* Where a flow arrives; 0 if that is not known, or no longer. */
static __always_inline struct place *place_of(__u64 flow)
{
	struct place *p = bpf_map_lookup_elem(&fl_steady, &flow), steady;

	if (!p) {
		p = bpf_map_lookup_elem(&fl_flows, &flow);
		if (p && p->epoch == fl_flow_epoch && bpf_ktime_get_coarse_ns() - p->learnt >= STEADY_NS) {
			steady = *p;
			bpf_map_update_elem(&fl_steady, &flow, &steady, BPF_ANY);
		}
	}
	return p && p->epoch == fl_flow_epoch ? p : 0;
}

SEC("tc")
int fl_inbound(struct __sk_buff *skb)
{
	__u32 syn = 0, priority = 0, index;
	__u64 flow = fl_flow_of(skb, fl_seed, &syn), *pending;
	struct place *p;

	if (flow) { /* TCP, UDP or an echo, and no fragment */
		p = place_of(flow);
		if (p && !syn) {
			priority = HANDLE | p->slot;
		} else { /* not known yet, or nobody's */
			priority = tag_of(flow);
			index = flow & (PENDING - 1);
			pending = bpf_map_lookup_elem(&fl_pending, &index);
			if (pending)
				*pending = flow;
		}
	}
	skb->priority = priority;
	/*
	 * Into the IFB's qdisc; from there the packet is received by the uplink
	 * as if it came now, past all programs of this hook. If the IFB has gone
	 * the packet is dropped: it goes only after this program has.
	 */
	return bpf_redirect(fl_ifb, 0);
}

/* Learns from a packet that has come to where this tenant receives. */
static __always_inline void delivered(struct __sk_buff *skb)
{
	__u32 tag = skb->priority, index;
	__u64 *flow, key;

	if ((tag & TAG_MASK) != TAG && (tag & MAJOR) != HANDLE)
		return; /* not ours; a HANDLE is no flow's tag (tag_of) */
	index = tag >> TAG_SHIFT & (PENDING - 1);
	flow = bpf_map_lookup_elem(&fl_pending, &index);
	if (flow) {
		key = *flow;
		if (key && tag_of(key) == tag) /* no other has taken its place */
			learn(key, fl_slot);
	}
	skb->priority = 0; /* it says nothing to others; a class of ours would pass the ceil by */
}

SEC("tc")
int fl_deliver(struct __sk_buff *skb)
{
	delivered(skb);
	return TCX_NEXT;
}

SEC("cgroup_skb/ingress")
int fl_arrive(struct __sk_buff *skb)
{
	delivered(skb);
	return 1; /* pass */
}
