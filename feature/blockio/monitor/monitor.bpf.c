//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Counts the block I/O of containers, its latency, and what runs while a container waits for
 * a CPU.
 *
 * Hooks, and cost per event (tp_btf):
 *   block_rq_complete  a clock, the look-up of an account, or else of a cgroup and its account,
 *                      and three atomic additions; where block_rq_issue is attached, also that
 *                      stamp, and four more
 *   block_rq_issue     a clock and a stamp
 *   sched_wakeup, sched_wakeup_new
 *                      the look-up of a cgroup; if it is watched, also a clock and a stamp
 *   sched_switch       a clock and the look-up of a cgroup; if it is watched, also that
 *                      stamp, another one if its group is throttled, and after a wait one
 *                      addition for each task that ran meanwhile
 *
 * The look-up of a cgroup goes up the tree until it finds a cgroup that user space has
 * registered. It looks at BELOW levels from the task's own cgroup up, and then at the first
 * ABOVE levels of the tree, so that a container cannot hide in cgroups that it makes. It does
 * not find a container below ABOVE levels from a task BELOW levels deeper.
 *
 * The first is attached only while a reservation exists or a report is being taken, the others
 * only for details: while a report is being taken or a reservation is missed, and for a moment
 * every few seconds. Package monitor attaches them and reads the maps. fl_lost counts what has no
 * place: I/O without an account (fl_accounts is full), a request without a stamp (its row of
 * fl_issued is full) or without a time at all, a wait without a stamp (its row of fl_since is
 * full) or without a pair, and look-ups that ended before they had seen all levels.
 */

/* Up to 69 s. Also monitor.go: subBits. */
#define HIST_SUB_BITS 2
#define HIST_TOP_BITS 36

#define STAMP_ROW_BITS 12

#include "hist.h"
#include "kernel.h"
#include "map.h"
#include "stamps.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* What found no place, by kind. Also monitor.go: Lost. */
struct lost {
	__u64 accounts;
	__u64 requests;
	__u64 waits;
	__u64 pairs;
	__u64 levels;
};
struct lost fl_lost;

/*
 * Since when the programs for details have been attached, ns; 0: they are not; the largest number:
 * some are. Written by user space. Older stamps and runs are of an earlier time, whose end no program
 * saw.
 */
__u64 fl_began;

#include "owner.bpf.h"

struct blkcg {
	struct cgroup_subsys_state css;
} __kernel_type;

struct blkcg_gq {
	struct blkcg *blkcg;
} __kernel_type;

struct bio {
	struct blkcg_gq *bi_blkg;
} __kernel_type;

struct gendisk {
	int major;
	int first_minor;
} __kernel_type;

struct request_queue {
	struct gendisk *disk;
} __kernel_type;

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
	unsigned int __data_len;
	struct bio *bio;
	__u64 start_time_ns;
} __kernel_type;

/* include/linux/blk_types.h */
#define REQ_OP_MASK 0xff
#define REQ_OP_READ 0
#define REQ_OP_WRITE 1

/*
 * An account: of a cgroup at a disk. The cgroup is one of fl_iogroups, or 0 for the system, and
 * has what those below it do. So most requests find theirs by their own cgroup.
 */
struct place {
	__u64 cgroup;
	__u32 major;
	__u32 minor;
};

struct account {
	__u64 ios[2]; /* completed; reads, writes */
	__u64 bytes[2];
	__u64 errors;
	__u64 last; /* when the last was completed, ns */
	__u64 under; /* from being made to completion, summed up, ns */
	/* Of those that were issued while fl_rq_issue was attached: */
	__u64 queue_sum, device_sum; /* ns */
	__u64 queue[HIST_BUCKETS]; /* from the request being made to its being given to the device */
	__u64 device[HIST_BUCKETS]; /* from there to its completion */
};
_Static_assert(sizeof(struct account) == 8 * (9 + 2 * HIST_BUCKETS), "read by monitor.go");

SPARSE(fl_accounts, 4096, struct place, struct account);

/* By request, when it was given to the device. Requests are as many as there are tags. */
MAP(fl_issued, ARRAY, 1 << STAMP_ROW_BITS, __u32, struct stamps);

/* A whole account of nothing, too large for the stack. */
const struct account fl_nothing;

SEC("tp_btf/block_rq_issue")
int BPF_PROG(fl_rq_issue, struct request *rq)
{
	put_stamp(&fl_issued, address(rq), bpf_ktime_get_ns()); /* without one it is lost at its completion */
	return 0;
}

/* Adds a time to a histogram. */
static __always_inline void add_time(__u64 *buckets, __u64 *sum, __u64 ns)
{
	__u32 index = fl_bucket(ns);

	if (index < HIST_BUCKETS) {
		__sync_fetch_and_add(&buckets[index], 1);
		__sync_fetch_and_add(sum, ns);
	}
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(fl_rq_complete, struct request *rq, int error, unsigned int bytes)
{
	__u64 now = bpf_ktime_get_ns(), issued = 0, began = fl_began, made;
	__u32 op = rq->cmd_flags & REQ_OP_MASK;
	struct cgroup___tree *g = 0;
	struct place at = {};
	struct account *a;
	struct gendisk *disk;
	struct blkcg_gq *blkg;
	struct bio *bio;
	int done = bytes >= rq->__data_len; /* else more of it is still to come */

	if (done && began)
		issued = take_stamp(&fl_issued, address(rq), now);
	if (issued < began)
		issued = 0;
	if (op != REQ_OP_READ && op != REQ_OP_WRITE)
		return 0; /* a flush, a discard: no I/O that anybody reserves */
	disk = rq->q->disk;
	if (!disk)
		return 0; /* a request to a controller */
	at.major = disk->major;
	at.minor = disk->first_minor;
	bio = rq->bio;
	if (bio) {
		blkg = bio->bi_blkg;
		if (blkg) {
			g = (struct cgroup___tree *)blkg->blkcg->css.cgroup;
			at.cgroup = g->kn->id;
		}
	}
	a = bpf_map_lookup_elem(&fl_accounts, &at);
	if (!a && g) {
		at.cgroup = owner(&fl_iogroups, g);
		a = bpf_map_lookup_elem(&fl_accounts, &at);
	}
	if (!a) {
		bpf_map_update_elem(&fl_accounts, &at, &fl_nothing, BPF_NOEXIST);
		a = bpf_map_lookup_elem(&fl_accounts, &at);
	}
	if (!a) {
		__sync_fetch_and_add(&fl_lost.accounts, 1);
		return 0;
	}
	if (error) {
		__sync_fetch_and_add(&a->errors, 1);
		return 0; /* nothing was read or written */
	}
	op &= 1; /* for the verifier */
	__sync_fetch_and_add(&a->bytes[op], bytes);
	if (!done)
		return 0;
	__sync_fetch_and_add(&a->ios[op], 1);
	a->last = now; /* of two at once, either */
	made = rq->start_time_ns; /* 0 where the queue keeps no statistics */
	if (made ? began && made >= began && !issued : !issued)
		__sync_fetch_and_add(&fl_lost.requests, 1);
	if (!made)
		made = issued;
	if (made && now > made)
		__sync_fetch_and_add(&a->under, now - made);
	if (!issued)
		return 0;
	add_time(a->device, &a->device_sum, now - issued);
	if (rq->start_time_ns && issued >= made)
		add_time(a->queue, &a->queue_sum, issued - made);
	return 0;
}

#include "waits.bpf.h"
