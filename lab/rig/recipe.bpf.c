//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The cache in front of an overlay network, as in the paper (ONCache, NSDI 2025), and
 * for comparison only: IPv4 in VXLAN, learning by two bits of the inner packets' DSCP, no
 * coherency, no TTL, no check of VNI and outer source. Two programs redirect known flows
 * past the overlay network; two learn from the packets that went through it.
 *
 * Hooks (tcx), and cost per event:
 *   fl_rcp_egress    ingress of the host end of a container's veth: up to four look-ups
 *   fl_rcp_learn_e   egress of the NIC: headers; of a marked packet three updates
 *   fl_rcp_ingress   ingress of the NIC: up to three look-ups
 *   fl_rcp_learn_i   ingress of the container's own device: headers; marked: two updates
 *
 * Reader of the maps: package rig writes fl_rcp_local. All are LRU: a full map evicts the
 * least recently used entry, and that flow takes the overlay network's path.
 */

#include "kernel.h"

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The tunnel's UDP port. Set before it is loaded. */
const volatile __u16 fl_port;

#define MISSED 0x04	 /* of the TOS: a look-up failed here */
#define ESTABLISHED 0x08 /* the connection is known in both directions; set by nftables */
#define MARKS (MISSED | ESTABLISHED)

/* Everything before the inner packet. */
struct outer {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__u32 vxlan[2];
	struct ethhdr inner;
} __attribute__((packed));
_Static_assert(sizeof(struct outer) == 64, "outer headers");

#define ROOM (sizeof(struct outer) - sizeof(struct ethhdr))

struct remote {
	struct outer headers;
	__u32 ifindex;
};

struct local {
	__u32 ifindex; /* of the host end */
	__u8 macs[12]; /* of the frames that the container gets */
	__u32 learned;
};

struct flow {
	__u32 local, remote;
	__u16 local_port, remote_port;
	__u32 proto;
};

struct seen {
	__u8 in, out;
};

#define CACHE(name, k, v, n)                       \
	struct {                                   \
		__uint(type, BPF_MAP_TYPE_LRU_HASH); \
		__uint(max_entries, n);            \
		__type(key, k);                    \
		__type(value, v);                  \
	} name SEC(".maps")

CACHE(fl_rcp_node, __u32, __u32, 4096);		 /* remote container to its node */
CACHE(fl_rcp_remote, __u32, struct remote, 1024);	 /* node to headers */
CACHE(fl_rcp_local, __u32, struct local, 1024);	 /* container here */
CACHE(fl_rcp_flow, struct flow, struct seen, 4096); /* what was seen of a flow */

struct inner {
	struct ethhdr eth;
	struct iphdr ip;
	__u16 source, dest;
} __attribute__((packed));

/* The frame at off, if it is TCP or UDP in IPv4. */
static __always_inline struct inner *frame(struct __sk_buff *skb, __u32 off)
{
	struct inner *h = (void *)(long)skb->data + off;

	if ((void *)(h + 1) > (void *)(long)skb->data_end || h->eth.h_proto != bpf_htons(ETH_P_IP) ||
	    h->ip.ihl != 5 || (h->ip.protocol != IPPROTO_TCP && h->ip.protocol != IPPROTO_UDP))
		return 0;
	return h;
}

/* The headers before a frame from the tunnel, or to it. */
static __always_inline struct outer *tunnel(struct __sk_buff *skb)
{
	struct outer *o = (void *)(long)skb->data;

	if ((void *)(o + 1) > (void *)(long)skb->data_end || o->eth.h_proto != bpf_htons(ETH_P_IP) ||
	    o->ip.ihl != 5 || o->ip.protocol != IPPROTO_UDP || o->udp.dest != bpf_htons(fl_port))
		return 0;
	return o;
}

static __always_inline struct flow flow_of(struct inner *h, int out)
{
	struct flow f = {
		.local = out ? h->ip.saddr : h->ip.daddr,
		.remote = out ? h->ip.daddr : h->ip.saddr,
		.local_port = out ? h->source : h->dest,
		.remote_port = out ? h->dest : h->source,
		.proto = h->ip.protocol,
	};

	return f;
}

static __always_inline int established(struct flow *f)
{
	struct seen *s = bpf_map_lookup_elem(&fl_rcp_flow, f);

	return s && s->in && s->out;
}

/* Changes the TOS of the frame at off. */
static __always_inline void mark(struct __sk_buff *skb, __u32 off, __u8 was, __u8 is)
{
	__u32 l3 = off + sizeof(struct ethhdr);

	bpf_l3_csum_replace(skb, l3 + offsetof(struct iphdr, check), bpf_htons(was), bpf_htons(is), 2);
	bpf_skb_store_bytes(skb, l3 + offsetof(struct iphdr, tos), &is, 1, 0);
}

static __always_inline void note(struct flow *f, int out)
{
	struct seen *s = bpf_map_lookup_elem(&fl_rcp_flow, f), fresh = { .in = !out, .out = out };

	if (!s)
		bpf_map_update_elem(&fl_rcp_flow, f, &fresh, BPF_ANY);
	else if (out)
		s->out = 1;
	else
		s->in = 1;
}

SEC("tc")
int fl_rcp_egress(struct __sk_buff *skb)
{
	struct inner *h = frame(skb, 0);
	struct remote *r = 0;
	struct local *l;
	struct outer *o;
	struct flow f;
	__u32 *node, len = skb->len, sum;
	__u8 tos;

	if (!h)
		return TCX_NEXT; /* not for the cache */
	f = flow_of(h, 1);
	tos = h->ip.tos;
	if (established(&f)) {
		node = bpf_map_lookup_elem(&fl_rcp_node, &f.remote);
		if (node)
			r = bpf_map_lookup_elem(&fl_rcp_remote, node);
	}
	l = r ? bpf_map_lookup_elem(&fl_rcp_local, &f.local) : 0;
	if (!l || !l->learned) {
		mark(skb, 0, tos, tos | MISSED);
		return TCX_NEXT; /* the overlay network's path */
	}
	sum = bpf_get_hash_recalc(skb);
	if (bpf_skb_adjust_room(skb, ROOM, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					BPF_F_ADJ_ROOM_ENCAP_L2(sizeof(struct ethhdr)) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return TCX_NEXT; /* no room: unchanged */
	o = (void *)(long)skb->data;
	if ((void *)(o + 1) > (void *)(long)skb->data_end)
		return TCX_DROP; /* it is half a packet now; cannot be */
	*o = r->headers;
	o->udp.source = bpf_htons(49152 + sum % 16384);
	o->udp.len = bpf_htons(len + sizeof(o->vxlan) + sizeof(o->udp));
	o->udp.check = 0;
	sum = (__u16)~o->ip.check + (__u16)~o->ip.tot_len;
	o->ip.tot_len = bpf_htons(len + ROOM - sizeof(struct ethhdr));
	sum += o->ip.tot_len;
	sum = (sum & 0xffff) + (sum >> 16);
	o->ip.check = ~((sum & 0xffff) + (sum >> 16));
	return bpf_redirect(r->ifindex, 0);
}

SEC("tc")
int fl_rcp_learn_e(struct __sk_buff *skb)
{
	struct outer *o = tunnel(skb);
	struct inner *h = o ? frame(skb, ROOM) : 0;
	struct remote r = {};
	struct flow f;
	__u32 node;
	__u8 tos;

	if (!h || (h->ip.tos & MARKS) != MARKS)
		return TCX_NEXT; /* a known flow, or one that is not established */
	f = flow_of(h, 1);
	tos = h->ip.tos;
	node = o->ip.daddr;
	r.headers = *o;
	r.ifindex = skb->ifindex;
	bpf_map_update_elem(&fl_rcp_node, &f.remote, &node, BPF_ANY);
	bpf_map_update_elem(&fl_rcp_remote, &node, &r, BPF_ANY);
	note(&f, 1);
	mark(skb, ROOM, tos, tos & ~MARKS);
	return TCX_NEXT; /* learnt */
}

SEC("tc")
int fl_rcp_ingress(struct __sk_buff *skb)
{
	struct outer *o = tunnel(skb);
	struct inner *h = o ? frame(skb, ROOM) : 0;
	struct local *l = 0;
	struct flow f;
	__u8 tos;

	if (!h)
		return TCX_NEXT; /* not for the cache */
	f = flow_of(h, 0);
	tos = h->ip.tos;
	if (established(&f) && bpf_map_lookup_elem(&fl_rcp_node, &f.remote))
		l = bpf_map_lookup_elem(&fl_rcp_local, &f.local);
	if (!l || !l->learned) {
		mark(skb, ROOM, tos, tos | MISSED);
		return TCX_NEXT; /* the overlay network's path */
	}
	if (bpf_skb_adjust_room(skb, -(int)ROOM, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
		return TCX_NEXT; /* unchanged */
	bpf_skb_store_bytes(skb, 0, l->macs, sizeof(l->macs), 0);
	return bpf_redirect_peer(l->ifindex, 0);
}

SEC("tc")
int fl_rcp_learn_i(struct __sk_buff *skb)
{
	struct inner *h = frame(skb, 0);
	struct local *l;
	struct flow f;
	__u8 tos;

	if (!h || (h->ip.tos & MARKS) != MARKS)
		return TCX_NEXT; /* a known flow, or one that is not established */
	f = flow_of(h, 0);
	tos = h->ip.tos;
	l = bpf_map_lookup_elem(&fl_rcp_local, &f.local);
	if (l) {
		__builtin_memcpy(l->macs, &h->eth, sizeof(l->macs));
		l->learned = 1;
		note(&f, 0);
	}
	mark(skb, 0, tos, tos & ~MARKS);
	return TCX_NEXT; /* learnt */
}
