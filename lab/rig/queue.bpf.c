//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Measures how long the requests of an experiment wait at the NIC's queue: from the
 * moment the kernel has a packet for the root qdisc to the moment the driver gets it.
 * The lock of the qdisc, its timers and the softirq that they need are included.
 *
 * Hooks, and cost per event (tp_btf):
 *   net_dev_queue       each packet of each device: three comparisons; for a
 *                       request an update of a hash
 *   net_dev_start_xmit  the same; for a request a look-up, a removal, a count
 *
 * The programs recognize a request by its length, which no other packet of an
 * experiment has at the NIC. Readers of the maps: package rig. A packet that the qdisc
 * drops leaves its stamp behind until another request has its address; a full
 * fl_since forgets the oldest. A request without a stamp counts in fl_lost.
 */

/* The resolution of the latencies of package load. */
#define HIST_SUB_BITS 4
#define HIST_TOP_BITS 40

#include "hist.h"
#include "kernel.h"
#include "map.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The NIC, and the length of a request there. Set before it is loaded. */
const volatile __u32 fl_netns, fl_ifindex, fl_length;

/* Requests without a stamp. */
__u64 fl_lost;

/* skb -> its arrival at the queue, ns */
MAP(fl_since, LRU_HASH, 4096, __u64, __u64);

MAP(fl_waited, ARRAY, HIST_BUCKETS, __u32, __u64);

static __always_inline int is_request(struct sk_buff *skb, struct net_device *dev)
{
	return skb->len == fl_length && dev->ifindex == fl_ifindex && dev->nd_net.net->ns.inum == fl_netns;
}

SEC("tp_btf/net_dev_queue")
int BPF_PROG(fl_queued, struct sk_buff *skb)
{
	__u64 key = (__u64)skb, now;

	if (!is_request(skb, skb->dev))
		return 0;
	now = bpf_ktime_get_ns();
	bpf_map_update_elem(&fl_since, &key, &now, BPF_ANY);
	return 0;
}

SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(fl_sent, struct sk_buff *skb, struct net_device *dev)
{
	__u64 key = (__u64)skb, now = bpf_ktime_get_ns(), *since, *n;
	__u32 index;

	if (!is_request(skb, dev))
		return 0;
	since = bpf_map_lookup_elem(&fl_since, &key);
	if (!since) {
		__sync_fetch_and_add(&fl_lost, 1);
		return 0;
	}
	index = fl_bucket(now - *since);
	bpf_map_delete_elem(&fl_since, &key);
	n = bpf_map_lookup_elem(&fl_waited, &index);
	if (n) /* always: the index is below HIST_BUCKETS */
		__sync_fetch_and_add(n, 1);
	return 0;
}
