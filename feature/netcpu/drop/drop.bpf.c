//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Early drop: packets for a container with a full receive queue are dropped where they
 * enter the host, before the bridge and any queue, instead of after it (Iron, section
 * 3.2, "Dropping excess packets").
 *
 * The queue is the ring of the container's veth. fl_count sees each packet just before it
 * enters the ring, fl_polled each poll that takes packets out; the difference is the
 * ring's length. While the ring is full, the container has used up its cgroup's share of
 * the CPU, and the next packet would be dropped at the ring anyway, at the expense of its
 * neighbours. Since 6.18 a used-up quota does not stop a thread; fl_polled detects that,
 * and packets for such a thread are dropped as if the ring were full. So are packets of a
 * tenant in the mode charge once its charges reach its limit; nothing waits in a ring
 * then.
 *
 * On the way it counts packets by tenant and queue of the uplink, so that a queue which
 * serves one container alone can be polled at its expense.
 *
 * At an uplink that the operator names, fl_drop_xdp replaces fl_drop_tc: in the driver
 * (never in generic mode), before there is an skb, with the same maps and the same
 * functions. They see different input. XDP gets the frame as it was on the wire, tc
 * without its first VLAN tag. XDP recognises packets for the host by the uplink's address
 * when the program was loaded, tc by pkt_type. XDP does not know which NAPI polls, so it
 * counts no queue. Both see the destination of the outermost IP header, and in VXLAN and
 * Geneve for the host that of the frame inside: packets in other tunnels or behind NAT
 * belong to no tenant here, each fragment has that header, and IPv6's extension headers
 * come after it.
 *
 * Hooks, and cost per event:
 *   tp_btf/napi_poll   fl_polled   one hash look-up per poll of any device
 *   tc egress, host end of an isolated container's veth
 *                      fl_count    one hash look-up and two atomic adds per packet;
 *                                  for a single one two more look-ups, and if
 *                                  neither end pays for it an add; ten times a second,
 *                                  for each address, a look at the host's routes
 *   tc ingress on an uplink
 *                      fl_drop_tc  two hash look-ups per packet; in a tunnel four
 *   native XDP on an uplink, in its place
 *                      fl_drop_xdp one hash look-up per packet; in a tunnel three;
 *                                  for a dropped one
 *                                  also a tail call that charges it
 *
 * User space creates the entries of fl_queues, fl_counted and fl_tunnels; a full map is an error of
 * Apply. fl_addresses is learnt here as an LRU map: packets to an address without an
 * entry are not dropped early. Once the agent has ended the programs no longer run, and
 * nothing is dropped.
 */

#include "charges.h"
#include "fate.h"
#include "identity.h"
#include "kernel.h"
#include "map.h"
#include "parse.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#include "maps.bpf.h"
#include "tunnel.bpf.h"

/*
 * A copy of fl_count is attached to host ends in one namespace whose ifindexes differ in
 * their lower bits, by which fl_veths tells whose they are.
 */
#define VETHS 1024

struct veth {
	__u32 slot;  /* 0: nobody's */
	__u8 mac[6]; /* of the container's end */
	__u8 pad[2];
};

volatile struct veth fl_veths[VETHS] SEC(".data.copy");
volatile __u32 fl_host_netns SEC(".data.copy");

/* The assumed size of a veth's ring: RING, or less in tests. */
const volatile __u32 fl_ring = RING;

/* The address of the uplink for fl_drop_xdp, set before it is loaded. */
const volatile __u8 fl_uplink_mac[6];

/*
 * Reports whether the running thread's group, or one above it (a pod's, for example), has
 * used up its quota: throttle_count counts them. Since 6.18 that does not stop a kernel
 * thread: it uses up the next time of the container's own tasks (kernel/sched/fair.c,
 * task_throttle_setup_work).
 */
static __always_inline int beyond_quota(void)
{
	struct task_struct *p = bpf_get_current_task_btf();

	if (!bpf_core_field_exists(struct cfs_rq, throttle_count))
		return 0; /* a kernel without quotas */
	if (!(p->flags & PF_KTHREAD))
		return 0; /* the interrupted task */
	return p->se.cfs_rq->throttle_count != 0;
}

SEC("tp_btf/napi_poll")
int BPF_PROG(fl_polled, struct napi_struct *napi, int work, int budget)
{
	struct net_device *dev = napi->dev;
	struct fl_device key = {};
	struct tenant *t;
	__u32 *slot;

	if (!dev) /* the polling of a CPU's backlog and of busy sockets */
		return 0;
	key.netns = fl_netns_of(dev);
	key.ifindex = dev->ifindex;
	slot = bpf_map_lookup_elem(&fl_counted, &key);
	if (!slot)
		return 0;
	t = bpf_map_lookup_elem(&fl_tenants, slot);
	if (!t)
		return 0; /* impossible: slots are below MAX_TENANTS */
	/*
	 * A poll that did not use its budget has emptied the ring. Packets still missing
	 * then were dropped at the ring or on the way.
	 */
	if (work < budget)
		t->polled = t->sent;
	else
		__sync_fetch_and_add(&t->polled, work);
	/* Not its waits: a short period gives no more credit than a long one. */
	t->stopped = beyond_quota() ? bpf_ktime_get_ns() : 0;
	return 0;
}

/* Reports whether a tenant has used up user space's limit for this period. */
static __always_inline int spent(struct tenant *t, __u64 now)
{
	__s64 *charge;

	if ((__s64)(t->until - now) <= 0)
		return 0; /* no limit, or it was not renewed */
	charge = bpf_map_lookup_elem(&fl_charges, &t->account);
	return charge && *charge >= t->limit;
}

/*
 * Reports whether packets may wait for a tenant with a used-up quota or limit, and counts
 * them as waiting: at most as many as fit into the ring of its veth. packets is 0 for a
 * mere question, as the packet will come by again.
 */
static __always_inline int waits(struct tenant *t, __u64 now, __u32 packets)
{
	if (!t->waits || (__s64)(now - t->waits) > WAIT_NS) {
		t->waits = now;
		t->waiting = 0;
	}
	if (t->waiting >= fl_ring)
		return 0;
	__sync_fetch_and_add(&t->waiting, packets);
	return 1;
}

/*
 * Reports whether a tenant cannot take packets now: its limit or quota is used up and no
 * more may wait for it, or the ring of its veth is full. At an uplink packets is 0:
 * packets that pass are counted later, on their way into the veth.
 */
static __always_inline int full(struct tenant *t, __u32 slot, __u64 now, __u32 packets)
{
	int ring = !packets; /* at the veth, its own driver checks the ring */
	int limited = spent(t, now), beyond = limited;

	if (!limited && t->no_ring)
		return 0; /* its packets do not go through its thread */
	if (!limited) /* signed, as another CPU may have set a later time by now */
		beyond = t->stopped && (__s64)(now - t->stopped) <= STOPPED_NS;
	if (beyond ? waits(t, now, packets) : !ring || (__s64)(t->sent - t->polled) < fl_ring)
		return 0; /* there is room, if only to wait */
	if (!limited && (__s64)(now - t->retried) > RETRY_NS) {
		t->retried = now;
		return 0;
	}
	__sync_fetch_and_add(&t->dropped, 1);
	if (beyond)
		__sync_fetch_and_add(&t->beyond, 1);
	fl_dropped_for(slot);
	return 1;
}

/*
 * Reports whether the next packet from an uplink comes too soon after those that passed.
 * Another CPU's packet at the same time may pass as well.
 */
static __always_inline int too_soon(struct tenant *t, __u32 slot, __u64 now)
{
	__u64 gap = t->gap, start = now - fl_ring * gap;

	if (!gap || (__s64)(t->paced_until - now) <= 0)
		return 0; /* no pace, or it was not renewed */
	if ((__s64)(t->next - start) < 0)
		t->next = start;
	if ((__s64)(t->next - now) < 0) {
		t->next += gap;
		return 0;
	}
	__sync_fetch_and_add(&t->dropped, 1);
	__sync_fetch_and_add(&t->beyond, 1);
	fl_dropped_for(slot);
	return 1;
}

/*
 * Reports whether the host would route a packet for this address to the container with
 * this veth. The host is the namespace of this end of it.
 */
static __always_inline int routed_here(struct __sk_buff *skb, volatile struct veth *v, struct fl_address *to)
{
	struct bpf_fib_lookup fib = { .ifindex = skb->ifindex };

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		fib.family = FL_AF_INET;
		__builtin_memcpy(&fib.ipv4_dst, &to->ip[12], 4);
	} else {
		fib.family = FL_AF_INET6;
		__builtin_memcpy(fib.ipv6_dst, to->ip, 16);
	}
	if (bpf_fib_lookup(skb, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return 0; /* no router, no route, or no neighbour entry yet */
	return fl_same_mac(fib.dmac, v->mac);
}

/* Records that a frame to this address goes into this veth. */
static __always_inline void learn(struct __sk_buff *skb, volatile struct veth *v, struct ethhdr *eth, struct fl_address *to)
{
	__u64 now = bpf_ktime_get_ns();
	struct owner us = { .seen = now, .slot = v->slot };
	struct owner *o;

	if (!fl_same_mac(eth->h_dest, v->mac))
		return; /* flooded by a bridge, or for a host behind the container */
	o = bpf_map_lookup_elem(&fl_addresses, to);
	if (o && (__s64)(now - o->seen) <= LEARNT_NS) {
		if (o->slot != us.slot) {
			o->contested = now;
		} else if ((__s64)(now - o->seen) > LEARNT_NS / 10) {
			o->seen = now;
			o->routed = routed_here(skb, v, to);
		}
		return;
	}
	__builtin_memcpy(us.mac, eth->h_dest, 6);
	us.routed = routed_here(skb, v, to);
	bpf_map_update_elem(&fl_addresses, to, &us, BPF_ANY);
}

/*
 * Reports whether a packet comes in the time of a third party: a task of neither the
 * tenant that sent it, by the veth that it came from, nor the tenant that receives it, nor
 * an idle CPU. A kernel thread is one: it works for many. What the host itself sends still
 * has a socket.
 */
static __always_inline int intrudes(struct __sk_buff *skb, __u32 receiver)
{
	struct task_struct *t = bpf_get_current_task_btf();
	struct fl_owner *sender;
	__u32 runs;

	if (!t->pid)
		return 0;
	if (t->flags & PF_KTHREAD)
		return 1;
	runs = fl_of_cgroup(fl_cgroup_of_task(t));
	if (!skb->ingress_ifindex)
		return runs != receiver && fl_cgroup_of_task(t) != bpf_skb_cgroup_id(skb);
	if (!runs || runs == receiver)
		return !runs;
	sender = fl_of_device(fl_host_netns, skb->ingress_ifindex);
	return !sender || !(sender->flags & FL_HOST_END) || sender->tenant != runs;
}

static __always_inline int to_many(struct __sk_buff *skb)
{
	return skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST;
}

SEC("tc")
int fl_count(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	volatile struct veth *v = &fl_veths[skb->ifindex % VETHS];
	__u32 slot = v->slot;
	/* The ring holds the segments of a super-packet, not the packet. */
	__u32 packets = skb->gso_segs > 1 ? skb->gso_segs : 1;
	struct fl_address to = {};
	struct tenant *t;

	t = bpf_map_lookup_elem(&fl_tenants, &slot);
	if (!slot || !t || skb->ingress_ifindex == skb->ifindex)
		return TCX_NEXT; /* no such slot; or it was counted before it came back from an IFB */
	/*
	 * The packet is from a sender on this host, so no uplink has seen it. A full ring
	 * alone is not checked here, because the veth checks it next.
	 */
	if ((t->stopped || t->until) && full(t, slot, bpf_ktime_get_ns(), packets))
		return TCX_DROP; /* its limit or quota is used up, and enough packets wait */
	__sync_fetch_and_add(packets > 1 ? &t->super : &t->small, 1);
	__sync_fetch_and_add(&t->sent, packets);
	if (packets == 1 && intrudes(skb, slot))
		__sync_fetch_and_add(&t->intruding, 1);

	if (!to_many(skb) && !fl_frame_destination(data, end, &to))
		learn(skb, v, data, &to);
	/* This program only looks: the others on the hook decide. */
	return TCX_NEXT;
}

/*
 * Reports whether a frame with this address is for a tenant that cannot take it. *slot
 * becomes the tenant, NOBODY, or STALE. routed: the frame is for the host, which routes
 * it.
 */
static __always_inline int unwanted(struct ethhdr *eth, struct fl_address *to, int routed, __u32 *slot)
{
	struct tenant *t;
	struct owner *o;
	__u64 now;

	*slot = NOBODY;
	o = bpf_map_lookup_elem(&fl_addresses, to);
	if (!o)
		return 0; /* not an isolated container's */
	now = bpf_ktime_get_ns();
	if (o->contested && (__s64)(now - o->contested) <= LEARNT_NS)
		return 0; /* two tenants claim it */
	if (routed ? !o->routed : !fl_same_mac(eth->h_dest, o->mac))
		return 0; /* the host, or the bridge, will deliver it elsewhere */
	*slot = STALE;
	if ((__s64)(now - o->seen) > LEARNT_NS)
		return 0; /* the address may be another tenant's by now */
	*slot = o->slot;
	t = bpf_map_lookup_elem(&fl_tenants, slot);
	if (!t || (!full(t, *slot, now, 0) && !too_soon(t, *slot, now)))
		return 0;
	__sync_fetch_and_add(&t->held, 1);
	return 1;
}

/*
 * Likewise for the frame in a packet of a tunnel that ends at this host. A bridge behind
 * the tunnel delivers it by its address, which the tenant's device has, or the host
 * routes it if the address is a tunnel device's own.
 */
static __always_inline int unwanted_inner(void *l3, void *end, __u16 proto, __u32 *slot)
{
	struct ethhdr *eth = tunnelled(l3, end, proto);
	struct fl_address to = {};
	__u64 mac = 0;

	if (!eth || eth->h_dest[0] & 1 || fl_frame_destination(eth, end, &to))
		return 0; /* no such packet, or for all */
	__builtin_memcpy(&mac, eth->h_dest, 6);
	return unwanted(eth, &to, bpf_map_lookup_elem(&fl_tunnels, &mac) != NULL, slot);
}

/* Counts a packet that came by an uplink: for a tenant, or for others, on each CPU apart. */
static __always_inline void arrives(__u32 slot)
{
	struct tenant *t;
	__u32 only = 0;
	__u64 *others;

	if (slot == NOBODY || slot == STALE) {
		others = bpf_map_lookup_elem(&fl_others, &only);
		if (others)
			(*others)++;
		return;
	}
	t = bpf_map_lookup_elem(&fl_tenants, &slot);
	if (t)
		__sync_fetch_and_add(&t->arrived, 1);
}

/* Counts a packet for a tenant in the queue that a NAPI polls. */
static __always_inline void came_by(__u32 napi, __u32 slot)
{
	struct queue *q = bpf_map_lookup_elem(&fl_queues, &napi);

	if (!q)
		return; /* not a queue that a container could get */
	/* One CPU polls a queue at a time, so no atomics are needed. */
	if (slot == STALE) {
		q->stale++;
	} else if (slot == NOBODY || q->slot != slot) {
		q->slot = slot;
		q->others++;
	} else {
		q->own++;
	}
}

SEC("tc")
int fl_drop_tc(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct fl_address to = {};
	int drop, host = skb->pkt_type == PACKET_HOST;
	__u32 slot;

	/*
	 * Not IP, or broadcast and multicast: for all, and too few to count or to drop.
	 */
	if (to_many(skb) || fl_frame_destination(data, end, &to))
		return TCX_NEXT;
	drop = unwanted(data, &to, host, &slot);
	if (host && slot == NOBODY)
		drop = unwanted_inner(data + ETH_HLEN, end, skb->protocol, &slot);
	arrives(slot);
	came_by(skb->napi_id, slot);
	/*
	 * The ring is full, or the limit or quota used up. Otherwise the other programs
	 * on the hook decide.
	 */
	return drop ? TCX_DROP : TCX_NEXT;
}

SEC("xdp.frags")
int fl_drop_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	void *l3 = data + sizeof(*eth);
	struct fl_address to = {};
	int drop, host;
	__u16 proto;
	__u32 slot;

	if (l3 > end || eth->h_dest[0] & 1)
		return XDP_PASS; /* truncated, or broadcast and multicast: for all */
	proto = eth->h_proto;
	if (proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD)) {
		struct fl_vlan_hdr *tag = l3;

		if ((void *)(tag + 1) > end)
			return XDP_PASS; /* truncated */
		proto = tag->h_vlan_encapsulated_proto;
		l3 += sizeof(*tag); /* tc does not see the first tag either; of two it sees one */
	}
	if (fl_destination(l3, end, proto, &to))
		return XDP_PASS; /* not IP */
	host = fl_same_mac(eth->h_dest, fl_uplink_mac);
	drop = unwanted(eth, &to, host, &slot);
	if (host && slot == NOBODY)
		drop = unwanted_inner(l3, end, proto, &slot);
	arrives(slot);
	if (!drop)
		return XDP_PASS; /* of no tenant, or there is room */
	/* The ring is full, or the limit or quota used up. */
	bpf_tail_call(ctx, &fl_charger, 0);
	fl_take_fate(); /* without accounts: no other packet may be taken for this one */
	return XDP_DROP;
}
