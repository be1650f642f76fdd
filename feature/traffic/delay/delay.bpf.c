//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How long packets wait in the root qdiscs of this feature: from when the qdisc
 * has taken a packet to when it gives it to the device. HTB and HFSC stamp
 * nothing themselves.
 *
 * Hooks, and cost per event (tp_btf):
 *   qdisc_enqueue   each packet at each root qdisc of the host: a comparison; at
 *                   one of ours a clock and two lines of an array, and beyond the
 *                   host's network namespace a look-up
 *   qdisc_dequeue   the same; at one of ours, for each packet of a batch, the two
 *                   lines again, and one or two look-ups of its class
 *
 * They are attached only while somebody measures. Readers of the maps: package
 * delay. Where no stamp of a row of fl_queued is free the packet has none, which
 * fl_missed counts, as it does what of a batch is beyond MAX_BATCH; one that was
 * enqueued before has none either, and is not counted. A packet that is dropped
 * after it was enqueued leaves its stamp behind, until it is too old, or its
 * address is another's.
 *
 * Who may make qdiscs in a namespace of its own may give one our handle: packets
 * have stamps only where a class of the device is measured.
 */

/* Up to 69 s. Also delay.go: subBits. */
#define HIST_SUB_BITS 3
#define HIST_TOP_BITS 36

#define STAMP_ROW_BITS 13

#include "hist.h"
#include "kernel.h"
#include "map.h"
#include "stamps.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* qdisc.Handle: "fl" */
#define HANDLE 0x666c0000U
#define MAJOR 0xffff0000U
#define DEFAULT 0xffff /* qdisc.MinorDefault: where HTB and HFSC put the rest */

#define MAX_BATCH 64

/* Packets for which there was no place in fl_queued, or that were too many at once. */
__u64 fl_missed;

/* The host's network namespace, in which nobody but root makes qdiscs. */
const volatile __u32 fl_host;

/* When packets were enqueued. Of two who dequeue one skb at once, at different devices, one is not measured. */
MAP(fl_queued, ARRAY, 1 << STAMP_ROW_BITS, __u32, struct stamps);

struct class {
	__u32 netns; /* inode */
	__u32 ifindex;
	__u32 minor;
};

struct delays {
	__u64 sum; /* ns */
	__u64 count[HIST_BUCKETS];
};
_Static_assert(sizeof(struct delays) == 8 * (1 + HIST_BUCKETS), "read by delay.go");

/* Those that are measured. User space makes the entries. */
SPARSE(fl_delays, 65536, struct class, struct delays);

/* Global as fl_bucket is. 0: from before, missed, or given back by the device. */
__noinline __u64 fl_take(__u64 key, __u64 now)
{
	return take_stamp(&fl_queued, key, now);
}

static __always_inline void count(struct class *c, __u32 priority, __u64 waited)
{
	__u32 index = fl_bucket(waited);
	struct delays *d;

	c->minor = (priority & MAJOR) == HANDLE ? priority & ~MAJOR : DEFAULT;
	d = bpf_map_lookup_elem(&fl_delays, c);
	if (!d) {
		c->minor = DEFAULT;
		d = bpf_map_lookup_elem(&fl_delays, c);
	}
	if (d && index < HIST_BUCKETS) { /* nobody asks for others */
		__sync_fetch_and_add(&d->sum, waited);
		__sync_fetch_and_add(&d->count[index], 1);
	}
}

/* Whether classes of a device are measured; each that has some has its DEFAULT. */
static __always_inline int measured(const struct netdev_queue *txq)
{
	struct class c = { .minor = DEFAULT };

	c.netns = txq->dev->nd_net.net->ns.inum;
	if (c.netns == fl_host)
		return 1; /* the handle says it */
	c.ifindex = txq->dev->ifindex;
	return bpf_map_lookup_elem(&fl_delays, &c) != 0;
}

SEC("tp_btf/qdisc_enqueue")
int BPF_PROG(fl_enqueue, struct Qdisc *q, const struct netdev_queue *txq, struct sk_buff *skb)
{
	if (q->handle != HANDLE || !measured(txq))
		return 0; /* not one of ours */
	if (!put_stamp(&fl_queued, address(skb), bpf_ktime_get_ns()))
		__sync_fetch_and_add(&fl_missed, 1);
	return 0;
}

SEC("tp_btf/qdisc_dequeue")
int BPF_PROG(fl_dequeue, struct Qdisc *q, const struct netdev_queue *txq, int packets, struct sk_buff *skb)
{
	struct class c = {};
	__u64 now, since;

	if (!skb || q->handle != HANDLE)
		return 0; /* it had nothing to send, or is not one of ours */
	now = bpf_ktime_get_ns();
	/* All of a batch are for one device. In the loop the verifier would take a second. */
	c.netns = txq->dev->nd_net.net->ns.inum;
	c.ifindex = txq->dev->ifindex;
	for (int i = 0; i < MAX_BATCH && i < packets && skb; i++, skb = skb->next) {
		since = fl_take(address(skb), now);
		if (since)
			count(&c, skb->priority, now - since);
	}
	if (packets > MAX_BATCH)
		__sync_fetch_and_add(&fl_missed, packets - MAX_BATCH);
	return 0;
}
