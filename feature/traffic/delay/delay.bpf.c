//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How long packets wait in the root qdiscs of this feature: from when the qdisc
 * has taken a packet to when it gives it to the device. HTB and HFSC stamp
 * nothing themselves.
 *
 * Hooks, and cost per event (tp_btf):
 *   qdisc_enqueue   each packet at each root qdisc of the host: a comparison; at
 *                   one of ours a clock and an update of a hash
 *   qdisc_dequeue   the same; at one of ours, for each packet of a batch, a
 *                   look-up and a removal, and two look-ups of its class
 *
 * They are attached only while somebody measures. Readers of the maps: package
 * delay. A full fl_queued leaves a packet without a stamp, which fl_missed
 * counts; one that was enqueued before has none either, and is not counted. A
 * packet that is dropped after it was enqueued leaves its stamp behind, until
 * the address is another's.
 */

#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* qdisc.Handle: "fl" */
#define HANDLE 0x666c0000U
#define MAJOR 0xffff0000U
#define DEFAULT 0xffff /* qdisc.MinorDefault: where HTB and HFSC put the rest */

#define MAX_BATCH 64

/* Packets for which there was no place in fl_queued. */
__u64 fl_missed;

/* skb -> when it was enqueued, ns */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u64);
} fl_queued SEC(".maps");

struct class {
	__u32 netns; /* inode */
	__u32 ifindex;
	__u32 minor;
};

/* hist.go: the buckets of Histogram */
#define SUB_BITS 3
#define SUB (1 << SUB_BITS)
#define TOP_BITS 36
#define BUCKETS ((TOP_BITS - SUB_BITS + 1) * SUB)

struct delays {
	__u64 count[BUCKETS];
};

/* Those that are measured. User space makes the entries. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct class);
	__type(value, struct delays);
} fl_delays SEC(".maps");

/*
 * The bucket of a delay. Global, so that the verifier looks at it once and not
 * for each packet of a batch, which is too much for that of 6.1.
 */
__noinline __u32 fl_bucket(__u64 ns)
{
	__u32 exp = 0;

	if (ns >= 1ULL << TOP_BITS)
		return BUCKETS - 1;
	for (__u32 step = 32; step; step /= 2)
		if (ns >> (exp + step) >= SUB)
			exp += step;
	return exp * SUB + (ns >> exp);
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
	if (d && index < BUCKETS) /* nobody asks for others */
		__sync_fetch_and_add(&d->count[index], 1);
}

SEC("tp_btf/qdisc_enqueue")
int BPF_PROG(fl_enqueue, struct Qdisc *q, const struct netdev_queue *txq, struct sk_buff *skb)
{
	__u64 key = (__u64)skb, now;

	if (q->handle != HANDLE)
		return 0; /* not one of ours */
	now = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&fl_queued, &key, &now, BPF_ANY))
		__sync_fetch_and_add(&fl_missed, 1);
	return 0;
}

SEC("tp_btf/qdisc_dequeue")
int BPF_PROG(fl_dequeue, struct Qdisc *q, const struct netdev_queue *txq, int packets, struct sk_buff *skb)
{
	__u64 now, key, *since;
	struct class c = {};

	if (!skb || q->handle != HANDLE)
		return 0; /* it had nothing to send, or is not one of ours */
	now = bpf_ktime_get_ns();
	/* All of a batch are for one device. In the loop the verifier would take a second. */
	c.netns = txq->dev->nd_net.net->ns.inum;
	c.ifindex = txq->dev->ifindex;
	for (int i = 0; i < MAX_BATCH && i < packets && skb; i++, skb = skb->next) {
		key = (__u64)skb;
		since = bpf_map_lookup_elem(&fl_queued, &key);
		if (!since)
			continue; /* from before, missed, or given back by the device */
		count(&c, skb->priority, now - *since);
		bpf_map_delete_elem(&fl_queued, &key);
	}
	return 0;
}
