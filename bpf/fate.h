/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What became of a packet that no later hook or tracepoint sees: a program dropped it, or
 * handed it over into a container by bpf_redirect_peer, past the backlog and the egress
 * hook of the host end. Only that program knows whose the packet was. netcpu's accounts
 * read it.
 *
 * Package identity makes the map; an object that includes this is opened with
 * Identity.Maps. A program tells of a packet right before it returns its verdict, in
 * softirq, on the CPU that handles the packet. Nothing is lost where nobody reads.
 */
#ifndef FL_FATE_H
#define FL_FATE_H

#include "kernel.h"

#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>

#define FL_DROPPED 1
#define FL_HANDED 2

struct fl_fate {
	__u16 tenant;  /* whose it was, by the slot of identity.h; 0: nobody's */
	__u8 fate;     /* 0: nothing was told */
	__u8 protocol; /* of what was handed over: IPPROTO_*, */
	__u32 bytes;   /* and its length from the IP header on */
};
_Static_assert(sizeof(struct fl_fate) == 8, "written at once");

/* Of the last packet of each CPU that was told of. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fl_fate);
} fl_fates SEC(".maps");

static __always_inline void fl_tell(struct fl_fate f)
{
	__u32 zero = 0;
	struct fl_fate *told = bpf_map_lookup_elem(&fl_fates, &zero);

	if (told) /* always: one entry, index 0 */
		*told = f;
}

/* The packet is dropped for the sake of a tenant, before a device says whose it is. */
static __always_inline void fl_dropped_for(__u16 tenant)
{
	struct fl_fate f = {.tenant = tenant, .fate = FL_DROPPED};

	fl_tell(f);
}

/*
 * The packet goes into a container of a tenant by bpf_redirect_peer. skb is as the
 * container gets it, without the headers of a tunnel, and protocol that of its IP header.
 * Not for bpf_redirect to a host end, whose egress hook sees the packet.
 */
static __always_inline void fl_handed_to(struct __sk_buff *skb, __u16 tenant, __u8 protocol)
{
	struct fl_fate f = {.tenant = tenant, .fate = FL_HANDED, .protocol = protocol, .bytes = skb->len - ETH_HLEN};

	fl_tell(f);
}

/* What was told last on this CPU, which is forgotten by this. */
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
