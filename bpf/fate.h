/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The fate of a packet that no later hook or tracepoint sees: a program dropped it, or
 * redirected it into a container by bpf_redirect_peer, past the backlog and the egress
 * hook of the host end. Only that program knows the packet's tenant. netcpu's accounts
 * read the map.
 *
 * Package identity creates the map; an object that includes this header is opened with
 * Identity.Maps. A program reports a packet right before it returns its verdict, in
 * softirq, on the CPU that handles the packet. Without a reader, the reports have no
 * effect.
 */
#ifndef FL_FATE_H
#define FL_FATE_H

#include "kernel.h"
#include "map.h"

#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>

#define FL_DROPPED 1
#define FL_HANDED 2

struct fl_fate {
	__u16 tenant;  /* slot of the packet's tenant (identity.h); 0: none */
	__u8 fate;     /* 0: no report */
	__u8 protocol; /* of a redirected packet: IPPROTO_*, */
	__u32 bytes;   /* and its length from the IP header on */
};
_Static_assert(sizeof(struct fl_fate) == 8, "written at once");

/* The last packet that was reported on each CPU. */
MAP(fl_fates, PERCPU_ARRAY, 1, __u32, struct fl_fate);

static __always_inline void fl_tell(struct fl_fate f)
{
	__u32 zero = 0;
	struct fl_fate *told = bpf_map_lookup_elem(&fl_fates, &zero);

	if (told) /* always: one entry, index 0 */
		*told = f;
}

/*
 * Reports a packet that is dropped on a tenant's account before it reaches a device of
 * the tenant.
 */
static __always_inline void fl_dropped_for(__u16 tenant)
{
	struct fl_fate f = {.tenant = tenant, .fate = FL_DROPPED};

	fl_tell(f);
}

/*
 * Reports a packet that bpf_redirect_peer takes into a tenant's container. skb is as the
 * container gets it, without tunnel headers; protocol is that of its IP header. Not for
 * bpf_redirect to a host end: the egress hook there sees the packet.
 */
static __always_inline void fl_handed_to(struct __sk_buff *skb, __u16 tenant, __u8 protocol)
{
	struct fl_fate f = {.tenant = tenant, .fate = FL_HANDED, .protocol = protocol, .bytes = skb->len - ETH_HLEN};

	fl_tell(f);
}

/* Returns the last report on this CPU and clears it. */
static __always_inline struct fl_fate fl_take_fate(void)
{
	__u32 zero = 0;
	struct fl_fate none = {}, f, *told = bpf_map_lookup_elem(&fl_fates, &zero);

	if (!told || !told->fate)
		return none;
	f = *told;
	*told = none;
	return f;
}

#endif
