//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Measures how long softirqs take, by vector, to check the accounts. It shares
 * nothing with them.
 *
 * Hooks, and cost per event (tp_btf):
 *   softirq_entry, _exit      each softirq: the clock, an array element
 *   local_timer_entry, _exit  each timer interrupt, if requested: the same
 *   netif_receive_skb         each packet, if requested: two reads
 *
 * A begin costs as much as an end, so the stopwatch measures the length of what it
 * encloses. Readers of the map: package rig. It cannot be full.
 */

#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <linux/ip.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/*
 * Whether NET_RX is counted separately by its packets: to or from an IPv4 address
 * that ends in 2, or in 3. Not on CPU 0, which is left to the packets that the
 * sender gets. Set before loading.
 */
const volatile __u8 fl_tells;

#define RX_SOFTIRQ 3
#define VECTORS 10
#define LOCAL_TIMER VECTORS
#define BY_WHOM (VECTORS + 1) /* NET_RX that brought none's, the one's, the other's, both's */
#define PLACES (BY_WHOM + 4)

struct stint {
	__u64 sum;
	__u64 began; /* 0: not seen */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PLACES);
	__type(key, __u32);
	__type(value, struct stint);
} fl_stints SEC(".maps");

/* The addresses of the packets in the CPU's run so far. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} fl_brought SEC(".maps");

static __always_inline int begin(__u32 place)
{
	__u64 now = bpf_ktime_get_ns();
	struct stint *s = bpf_map_lookup_elem(&fl_stints, &place);

	if (s)
		s->began = now;
	return 0;
}

static __always_inline int end(__u32 place)
{
	__u64 now = bpf_ktime_get_ns();
	struct stint *s = bpf_map_lookup_elem(&fl_stints, &place);
	__u32 zero = 0, *brought;

	if (!s || !s->began)
		return 0; /* it began before we were attached */
	now -= s->began;
	s->sum += now;
	if (!fl_tells || place != RX_SOFTIRQ)
		return 0;
	brought = bpf_map_lookup_elem(&fl_brought, &zero);
	if (!brought)
		return 0; /* cannot be */
	place = BY_WHOM + (*brought & 3);
	*brought = 0;
	s = bpf_map_lookup_elem(&fl_stints, &place);
	if (s)
		s->sum += now;
	return 0;
}

SEC("tp_btf/softirq_entry")
int BPF_PROG(fl_softirq, unsigned int vec)
{
	return begin(vec);
}

SEC("tp_btf/softirq_exit")
int BPF_PROG(fl_softirq_end, unsigned int vec)
{
	return end(vec);
}

SEC("tp_btf/local_timer_entry")
int BPF_PROG(fl_timer, int vector)
{
	return begin(LOCAL_TIMER);
}

SEC("tp_btf/local_timer_exit")
int BPF_PROG(fl_timer_end, int vector)
{
	return end(LOCAL_TIMER);
}

static __always_inline __u32 whose(__u32 addr)
{
	__u32 last = bpf_ntohl(addr) & 0xff;

	return last == 2 || last == 3 ? last - 1 : 0;
}

SEC("tp_btf/netif_receive_skb")
int BPF_PROG(fl_received, struct sk_buff *skb)
{
	__u32 zero = 0, *brought = bpf_map_lookup_elem(&fl_brought, &zero);
	struct iphdr ip;

	if (!brought || !bpf_get_smp_processor_id() || skb->protocol != bpf_htons(0x0800) || bpf_probe_read_kernel(&ip, sizeof(ip), skb->data))
		return 0; /* none of theirs */
	*brought |= whose(ip.saddr) | whose(ip.daddr);
	return 0;
}
