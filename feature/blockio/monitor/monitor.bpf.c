//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Who does block I/O, how long it takes, and who runs while a container waits for a CPU.
 *
 * Hooks, and cost per event (tp_btf):
 *   block_rq_issue     a clock and a stamp
 *   block_rq_complete  a clock, that stamp again, the look-up of a cgroup and of
 *                      its account, and two or three atomic additions
 *   sched_wakeup, sched_wakeup_new
 *                      the look-up of a cgroup; of one that is watched, also a clock
 *                      and a stamp
 *   sched_switch       a clock and the look-up of a cgroup; of one that is watched,
 *                      also that stamp, and when it waited, an addition for
 *                      each of those who ran meanwhile
 *
 * The look-up of a cgroup goes up the tree, at most MAX_LEVEL levels, until it finds
 * one that user space has named.
 *
 * They are attached only while a reservation exists or somebody looks. Readers of
 * the maps: package monitor. fl_lost counts what found no place: I/O without an
 * account (fl_accounts is full), a request without a stamp (its row of fl_issued is
 * full, or it was issued before the programs were attached), a wait without a stamp
 * (its row of fl_since is full) or a pair.
 */

/* Up to 69 s. Also monitor.go: subBits. */
#define HIST_SUB_BITS 2
#define HIST_TOP_BITS 36

#define STAMP_ROW_BITS 12

#include "hist.h"
#include "kernel.h"
#include "stamps.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char _license[] SEC("license") = "Dual BSD/GPL";

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
} __kernel_type;

/* Flavours of what kernel.h has: other objects do not need these fields. */
struct cgroup___tree {
	struct cgroup_subsys_state self;
	struct kernfs_node *kn;
} __kernel_type;

struct task_struct___state {
	unsigned int __state; /* since 5.14 */
} __kernel_type;

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

#define MAX_GROUPS 8192
#define MAX_LEVEL 8

/* Owners that are no container. Also monitor.go. */
#define SYSTEM 0ULL /* everything that is in no container */
#define IDLE (~0ULL) /* nobody ran */
#define UNSEEN (~1ULL) /* so long ago that fl_runs has forgotten */

/* What found no place, by kind. Also monitor.go: Lost. */
struct lost {
	__u64 accounts;
	__u64 requests;
	__u64 waits;
	__u64 pairs;
};
struct lost fl_lost;

/* Cgroup v2 id -> container. Written by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_GROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u64);
} fl_groups SEC(".maps");

/* The same for the hierarchy with the io or blkio controller, whose ids are its own. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_GROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u64);
} fl_iogroups SEC(".maps");

/* An account: of a container (0: the system) at a disk. */
struct place {
	__u64 container;
	__u32 major;
	__u32 minor;
};

struct account {
	__u64 ios[2]; /* completed; reads, writes */
	__u64 bytes[2];
	__u64 errors;
	__u64 last; /* when the last was completed, ns */
	__u64 queue_sum, device_sum; /* ns */
	__u64 queue[HIST_BUCKETS]; /* from the request being made to its being given to the device */
	__u64 device[HIST_BUCKETS]; /* from there to its completion */
};
_Static_assert(sizeof(struct account) == 8 * (8 + 2 * HIST_BUCKETS), "read by monitor.go");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct place);
	__type(value, struct account);
} fl_accounts SEC(".maps");

/* By request, when it was given to the device. Requests are as many as there are tags. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << STAMP_ROW_BITS);
	__type(key, __u32);
	__type(value, struct stamps);
} fl_issued SEC(".maps");

/* A container that is watched: how it waited for CPUs. User space makes the entries. */
struct switches {
	__u64 voluntary; /* context switches */
	__u64 involuntary;
	__u64 foreign; /* involuntary ones in favour of others */
	__u64 wait_sum; /* ns */
	__u64 wait[HIST_BUCKETS]; /* from being woken, or preempted, to running */
};
_Static_assert(sizeof(struct switches) == 8 * (4 + HIST_BUCKETS), "read by monitor.go");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct switches);
} fl_watched SEC(".maps");

/* Who waited, and who ran meanwhile. */
struct pair {
	__u64 victim;
	__u64 culprit;
};

struct wait {
	__u64 ns;
	__u64 times;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct pair);
	__type(value, struct wait);
} fl_waits SEC(".maps");

/*
 * By thread, since when it waits for a CPU. Threads of watched containers only, and
 * only while they wait. No task storage: to allocate it below the run queue's lock fails
 * on Linux 7.2.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << STAMP_ROW_BITS);
	__type(key, __u32);
	__type(value, struct stamps);
} fl_since SEC(".maps");

/* Who ran last on each CPU, and from when on. A ring: the last is at head. */
#define RUNS 16

struct run {
	__u64 since;
	__u64 who;
};

struct runs {
	__u64 head;
	struct run run[RUNS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct runs);
} fl_runs SEC(".maps");

/* A whole account of nothing, too large for the stack. */
const struct account fl_nothing;

static __always_inline __u64 owner(void *groups, struct cgroup___tree *g)
{
	for (int i = 0; i < MAX_LEVEL; i++) {
		struct cgroup_subsys_state *up;
		__u64 id, *container;

		id = g->kn->id;
		container = bpf_map_lookup_elem(groups, &id);
		if (container)
			return *container;
		up = g->self.parent;
		if (!up)
			return SYSTEM; /* that was the root */
		g = (struct cgroup___tree *)up->cgroup;
	}
	return SYSTEM; /* a container lies no deeper than that below those that are named */
}

static __always_inline __u64 owner_of(struct task_struct *t)
{
	if (!t->pid)
		return IDLE;
	return owner(&fl_groups, (struct cgroup___tree *)t->cgroups->dfl_cgrp);
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(fl_rq_issue, struct request *rq)
{
	put_stamp(&fl_issued, address(rq), bpf_ktime_get_ns()); /* without one it is lost at its completion */
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(fl_rq_complete, struct request *rq, int error, unsigned int bytes)
{
	__u32 op = rq->cmd_flags & REQ_OP_MASK, index;
	__u64 now, since;
	struct place at = {};
	struct account *a;
	struct gendisk *disk;
	struct blkcg_gq *blkg;
	struct bio *bio;
	int done = bytes >= rq->__data_len; /* else more of it is still to come */

	now = bpf_ktime_get_ns();
	since = done ? take_stamp(&fl_issued, address(rq), now) : 0;
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
		if (blkg)
			at.container = owner(&fl_iogroups, (struct cgroup___tree *)blkg->blkcg->css.cgroup);
	}
	a = bpf_map_lookup_elem(&fl_accounts, &at);
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
	if (!since) {
		__sync_fetch_and_add(&fl_lost.requests, 1);
		return 0;
	}
	index = fl_bucket(now - since);
	if (index < HIST_BUCKETS) {
		__sync_fetch_and_add(&a->device[index], 1);
		__sync_fetch_and_add(&a->device_sum, now - since);
	}
	now = rq->start_time_ns; /* 0 where the queue keeps no statistics */
	if (now && since >= now) {
		index = fl_bucket(since - now);
		if (index < HIST_BUCKETS) {
			__sync_fetch_and_add(&a->queue[index], 1);
			__sync_fetch_and_add(&a->queue_sum, since - now);
		}
	}
	return 0;
}

/* A thread of a watched container waits from now on. Global, as fl_bucket is; so is the other. */
__noinline int fl_wait(__u64 pid, __u64 now)
{
	if (!put_stamp(&fl_since, pid, now))
		__sync_fetch_and_add(&fl_lost.waits, 1);
	return 0;
}

/* Since when it has waited, 0 if it has not; it waits no longer. */
__noinline __u64 fl_end_wait(__u64 pid, __u64 now)
{
	return take_stamp(&fl_since, pid, now);
}

static __always_inline int woken(struct task_struct *t)
{
	__u64 who = owner_of(t);

	if (who != SYSTEM && bpf_map_lookup_elem(&fl_watched, &who))
		fl_wait(t->pid, bpf_ktime_get_ns());
	return 0;
}

SEC("tp_btf/sched_wakeup")
int BPF_PROG(fl_wakeup, struct task_struct *t)
{
	return woken(t);
}

SEC("tp_btf/sched_wakeup_new")
int BPF_PROG(fl_wakeup_new, struct task_struct *t)
{
	return woken(t);
}

static __always_inline void blame(__u64 victim, __u64 culprit, __u64 ns)
{
	struct pair p = { .victim = victim, .culprit = culprit };
	struct wait *w = bpf_map_lookup_elem(&fl_waits, &p), first = { .ns = ns, .times = 1 };

	if (!w) {
		if (!bpf_map_update_elem(&fl_waits, &p, &first, BPF_NOEXIST))
			return;
		w = bpf_map_lookup_elem(&fl_waits, &p); /* another CPU was first */
	}
	if (!w) {
		__sync_fetch_and_add(&fl_lost.pairs, 1);
		return;
	}
	__sync_fetch_and_add(&w->ns, ns);
	__sync_fetch_and_add(&w->times, 1);
}

/*
 * Blames those who ran on this CPU from since to now. A task that waited at another
 * CPU first is taken to have waited here all the time.
 */
static __always_inline void waited(struct runs *r, __u64 victim, __u64 since, __u64 now)
{
	__u64 end = now;

	for (int i = 0; i < RUNS && end > since; i++) {
		struct run *run = &r->run[(r->head - i) % RUNS];
		__u64 from;

		if (!run->since)
			break; /* the programs have been attached since */
		from = run->since > since ? run->since : since;
		if (from < end) {
			if (run->who != IDLE) /* nobody is in the way where a CPU wakes up */
				blame(victim, run->who, end - from);
			end = from;
		}
	}
	if (end > since)
		blame(victim, UNSEEN, end - since);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(fl_switch, _Bool preempt, struct task_struct *prev, struct task_struct *next)
{
	__u64 now = bpf_ktime_get_ns(), who, was, since;
	struct switches *w;
	struct runs *r;
	__u32 zero = 0;

	r = bpf_map_lookup_elem(&fl_runs, &zero);
	if (!r)
		return 0; /* for the verifier */
	who = owner_of(next);
	was = r->run[r->head % RUNS].who;
	if (was != SYSTEM && was != IDLE) {
		w = bpf_map_lookup_elem(&fl_watched, &was);
		if (w) {
			/* As the kernel counts them: what would go on running did not want to go. */
			if (preempt || !((struct task_struct___state *)prev)->__state) {
				__sync_fetch_and_add(&w->involuntary, 1);
				if (who != was)
					__sync_fetch_and_add(&w->foreign, 1);
				fl_wait(prev->pid, now);
			} else {
				__sync_fetch_and_add(&w->voluntary, 1);
				/* It does not wait, though a wake-up came before it slept. */
				fl_end_wait(prev->pid, now);
			}
		}
	}
	if (who != SYSTEM && who != IDLE) {
		w = bpf_map_lookup_elem(&fl_watched, &who);
		since = w ? fl_end_wait(next->pid, now) : 0;
		if (w && since) {
			__u32 index = fl_bucket(now - since);

			if (index < HIST_BUCKETS) {
				__sync_fetch_and_add(&w->wait[index], 1);
				__sync_fetch_and_add(&w->wait_sum, now - since);
			}
			waited(r, who, since, now);
		}
	}
	r->head++;
	r->run[r->head % RUNS].since = now;
	r->run[r->head % RUNS].who = who;
	return 0;
}
