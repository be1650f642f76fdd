//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Records when packets of a UDP port leave and enter by the NIC, to check the round
 * trips of feature latency. It shares nothing with the feature.
 *
 * Hooks, and cost per event (tp_btf):
 *   net_dev_start_xmit      each packet of each device: two comparisons; for the port's
 *                           packets a read of the header, the clock, an array element
 *   napi_gro_receive_entry  the same
 *
 * Readers of the map: package rig. A full map records no more.
 */

#include "kernel.h"
#include "map.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The NIC, and the port at the far side. Set before it is loaded. */
const volatile __u32 fl_netns, fl_ifindex;
const volatile __u16 fl_port;

#define STAMPS 65536

struct stamp {
	__u64 at; /* ns */
	__u64 out;
};

MAP(fl_stamps, ARRAY, STAMPS, __u32, struct stamp);

/* The number of stamps. One packet is under way at a time. */
__u32 fl_taken;

static __always_inline int take(struct net_device *dev, __u64 l3, int out)
{
	struct {
		struct iphdr ip; /* without options */
		struct udphdr udp;
	} h;
	struct stamp *s;
	__u32 index;

	if (bpf_probe_read_kernel(&h, sizeof(h), (void *)l3) || h.ip.protocol != IPPROTO_UDP ||
	    (out ? h.udp.dest : h.udp.source) != bpf_htons(fl_port))
		return 0; /* not of the experiment */
	index = fl_taken;
	s = bpf_map_lookup_elem(&fl_stamps, &index);
	if (!s)
		return 0; /* full */
	s->out = out;
	s->at = bpf_ktime_get_ns();
	fl_taken = index + 1;
	return 0;
}

static __always_inline int is_nic(struct net_device *dev)
{
	return dev->ifindex == fl_ifindex && dev->nd_net.net->ns.inum == fl_netns;
}

SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(fl_out, struct sk_buff *skb, struct net_device *dev)
{
	__u64 head = 0;

	if (!is_nic(dev))
		return 0;
	bpf_core_read(&head, sizeof(head), &skb->head);
	return take(dev, head + skb->network_header, 1);
}

SEC("tp_btf/napi_gro_receive_entry")
int BPF_PROG(fl_in, struct sk_buff *skb)
{
	__u64 data = 0;

	if (!is_nic(skb->dev))
		return 0;
	bpf_core_read(&data, sizeof(data), &skb->data);
	return take(skb->dev, data, 0);
}
