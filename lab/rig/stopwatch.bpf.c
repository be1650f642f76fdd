//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Measures how long softirqs take, by vector, to check the accounts. It shares
 * nothing with them.
 *
 * Hooks, and cost per event (tp_btf):
 *   softirq_entry, _exit  each softirq: the clock, an array element
 *
 * A begin costs as much as an end, so the stopwatch measures the length of what it
 * encloses. Readers of the map: package rig. It cannot be full.
 */

#include "kernel.h"
#include "map.h"

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#define VECTORS 10

struct stint {
	__u64 sum;
	__u64 began; /* 0: not seen */
};

MAP(fl_stints, PERCPU_ARRAY, VECTORS, __u32, struct stint);

SEC("tp_btf/softirq_entry")
int BPF_PROG(fl_softirq, unsigned int vec)
{
	__u64 now = bpf_ktime_get_ns();
	struct stint *s = bpf_map_lookup_elem(&fl_stints, &vec);

	if (s)
		s->began = now;
	return 0;
}

SEC("tp_btf/softirq_exit")
int BPF_PROG(fl_softirq_end, unsigned int vec)
{
	__u64 now = bpf_ktime_get_ns();
	struct stint *s = bpf_map_lookup_elem(&fl_stints, &vec);

	if (s && s->began) /* else it began before we were attached */
		s->sum += now - s->began;
	return 0;
}
