//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Whose packet is it? Each packet that a tenant sends is given the tenant's
 * slot where it enters the host, and at the uplink the slot is what chooses its
 * class: HTB and HFSC take skb->priority for one, without any filter (the CNid
 * of CNTC, section 3.1, without its patch).
 *
 * The identity travels in skb->priority as handle:slot. The kernel clears the
 * field when a packet leaves a container by a veth and keeps it through
 * bridges, tunnels (also those of another namespace) and, with
 * net.ipv4.ip_forward_update_priority at 0, through routing and NAT. A part of
 * the mark can carry it as well, and so can tc_index. Packets that did not come
 * in by a device (of containers in the host's namespace, of macvlan) are told
 * by the cgroup of their socket.
 *
 * What a tenant has written into these fields itself is overwritten at the
 * host's end of its veth. Where there is no such end it counts for nothing once
 * fl_strict is set, as it is while there are macvlan devices.
 *
 * Hooks, and cost per event:
 *   tcx ingress, host end of a tenant's veth
 *                     fl_identify   three stores at most
 *   tcx egress, uplinks
 *                     fl_normalise  one look-up of a per-CPU array; for packets
 *                                   of a socket of this host up to nine of a hash
 *
 * User space makes the entries of fl_cgroups; a full map is an error of Apply,
 * and the containers that are in it keep what they have. fl_paths is read by
 * tests and by Snapshot. The programs are held by links that end with the
 * agent: then all packets share the default class.
 */

#include "kernel.h"

#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* qdisc.Handle: "fl" */
#define HANDLE 0x666c0000U
#define MAJOR 0xffff0000U

/* The tenant whose copy of fl_identify this is. Set before it is loaded. */
const volatile __u32 fl_slot;
/* The bits of the mark that carry the slot; 0: none. A slot has 16 bits. */
const volatile __u32 fl_mark_mask;
const volatile __u32 fl_mark_shift;
/* Whether tc_index is ours to use. */
const volatile __u32 fl_tc_index;

/* Only sockets speak for packets that did not come in by a device. */
volatile __u32 fl_strict;
/* Whether fl_cgroups has any entry, and the levels at which its cgroups lie. */
volatile __u32 fl_levels;

#define MAX_CGROUPS 65536
#define MAX_LEVEL 8

/* cgroup v2 id -> slot; 0 is nobody, whatever the packet says. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CGROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} fl_cgroups SEC(".maps");

enum told {
	BY_PRIORITY,
	BY_MARK,
	BY_TC_INDEX,
	BY_SOCKET,
	NOBODYS,
	FORGED, /* claimed a slot that is not its own to claim */
	PATHS,
};

/* Packets at uplinks, by what told their slot. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PATHS);
	__type(key, __u32);
	__type(value, __u64);
} fl_paths SEC(".maps");

SEC("tc")
int fl_identify(struct __sk_buff *skb)
{
	skb->priority = HANDLE | fl_slot;
	if (fl_mark_mask)
		skb->mark = (skb->mark & ~fl_mark_mask) | (fl_slot << fl_mark_shift & fl_mark_mask);
	if (fl_tc_index)
		skb->tc_index = fl_slot;
	return TCX_NEXT; /* nothing is decided here: let the others see it */
}

static __always_inline void count(__u32 path)
{
	__u64 *n = bpf_map_lookup_elem(&fl_paths, &path);

	if (n)
		(*n)++;
}

/*
 * The slot of the tenant whose socket sent it; -1 if the socket is nobody's, or
 * there is none. A tenant's own cgroup may have further ones below.
 */
static __always_inline int of_socket(struct __sk_buff *skb)
{
	__u32 levels = fl_levels, *slot;
	__u64 id;
	int level;

	if (!levels)
		return -1;
	id = bpf_skb_cgroup_id(skb);
	if (!id) /* no socket, or one that has none: of a SYN, or in TIME_WAIT */
		return -1;
	slot = bpf_map_lookup_elem(&fl_cgroups, &id);
	if (slot)
		return *slot;
#pragma unroll
	for (level = 1; level <= MAX_LEVEL; level++) {
		if (!(levels & 1U << level))
			continue;
		id = bpf_skb_ancestor_cgroup_id(skb, level);
		if (!id)
			break;
		slot = bpf_map_lookup_elem(&fl_cgroups, &id);
		if (slot)
			return *slot;
	}
	return -1;
}

/* The slot that a packet carries; 0 if it carries none. */
static __always_inline __u32 carried(struct __sk_buff *skb, __u32 *path)
{
	__u32 slot;

	if ((skb->priority & MAJOR) == HANDLE) {
		*path = BY_PRIORITY;
		return skb->priority & ~MAJOR;
	}
	slot = (skb->mark & fl_mark_mask) >> fl_mark_shift;
	if (slot) {
		*path = BY_MARK;
		return slot;
	}
	slot = fl_tc_index ? skb->tc_index : 0;
	if (slot)
		*path = BY_TC_INDEX;
	return slot;
}

SEC("tc")
int fl_normalise(struct __sk_buff *skb)
{
	__u32 path = NOBODYS, slot = carried(skb, &path);

	if (!skb->ingress_ifindex) {
		/* Of a socket here, of a macvlan, or out of a tunnel. */
		int told = of_socket(skb);

		if (told >= 0) {
			slot = told;
			path = told ? BY_SOCKET : NOBODYS;
		} else if (fl_strict && slot) {
			slot = 0;
			path = FORGED;
		}
	}
	count(path);
	if (slot)
		skb->priority = HANDLE | slot;
	else if ((skb->priority & MAJOR) == HANDLE)
		skb->priority = 0; /* goes into the default class */
	/* Others' priorities mean nothing to our root, and something to them. */
	return TCX_NEXT;
}
