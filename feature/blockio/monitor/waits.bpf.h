/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How long threads wait for CPUs, and what runs meanwhile. Part of monitor.bpf.c.
 */
#ifndef FL_MONITOR_WAITS_BPF_H
#define FL_MONITOR_WAITS_BPF_H

struct rq {
	__u64 prev_steal_time; /* CONFIG_PARAVIRT; at ticks */
	__u64 prev_steal_time_rq; /* CONFIG_PARAVIRT_TIME_ACCOUNTING */
} __kernel_type;

struct cfs_rq___rq {
	struct rq *rq;
} __kernel_type;

/* With CONFIG_RT_GROUP_SCHED. */
struct rt_rq {
	int rt_throttled;
} __kernel_type;

struct sched_rt_entity {
	struct sched_rt_entity *parent;
	struct rt_rq *rt_rq;
} __kernel_type;

struct sched_dl_entity {
	unsigned int dl_throttled : 1;
} __kernel_type;

struct task_group {
} __kernel_type;

struct task_io_accounting {
	__u64 read_bytes;
	__u64 write_bytes;
} __kernel_type;

struct task_struct___sched {
	unsigned int __state;
	int prio;
	struct sched_rt_entity rt;
	struct sched_dl_entity dl;
	struct task_group *sched_task_group;
	struct task_io_accounting ioac;
	unsigned int in_iowait : 1;
} __kernel_type;

/* include/linux/sched/prio.h */
#define MAX_DL_PRIO 0
#define MAX_RT_PRIO 100

/* Ids in place of a culprit's. Also decide/window.go. */
#define QUOTA (~2ULL) /* a quota of the task's group, or of one above it, was used up */
#define REALTIME (~3ULL) /* the task's real-time budget was used up */
#define STOLEN (~4ULL) /* the hypervisor had the CPU */

/* A container that is watched: how it waited for CPUs. User space makes the entries. */
struct switches {
	__u64 shown; /* it has reserved nothing: its pairs are in fl_shown */
	__u64 voluntary; /* context switches */
	__u64 involuntary;
	__u64 foreign; /* involuntary ones in favour of others */
	__u64 wait_sum; /* ns */
	__u64 wait[HIST_BUCKETS]; /* from being woken, or preempted, to running */
};
_Static_assert(sizeof(struct switches) == 8 * (5 + HIST_BUCKETS), "read by monitor.go");

SPARSE(fl_watched, 1024, __u64, struct switches);

/* Who waited, and who ran meanwhile. */
struct pair {
	__u64 victim;
	__u64 culprit;
};

struct wait {
	__u64 ns;
	__u64 io; /* ns of waits that kept it from its I/O */
	__u64 times;
};

MAP(fl_waits, HASH, 8192, struct pair, struct wait);

/* The same for containers without a reservation, which must take no room of the others. */
MAP(fl_shown, HASH, 8192, struct pair, struct wait);

/*
 * By thread, since when it waits for a CPU, or sleeps after it has asked for I/O, and
 * by what throttles threads, when it was last seen to do so. Of watched containers only.
 * No task storage: to allocate it below the run queue's lock fails on Linux 7.2.
 *
 * The lowest bits of a thread's stamp say what it waits after.
 */
#define AFTER 3ULL
#define OTHER 0ULL /* it was preempted or woken, and had no I/O to do as far as is known */
#define IO 1ULL /* it was preempted in the run in which it asked for I/O, or was woken by it */
#define WOKEN 2ULL /* I/O woke it, or it slept after it had asked for some */
#define ASLEEP 3ULL /* it does not wait: it sleeps after it has asked for I/O */

MAP(fl_since, ARRAY, 1 << STAMP_ROW_BITS, __u32, struct stamps);

/*
 * Who ran last on each CPU, and from when on: threads of one owner that followed one
 * another are one run. A ring: the last is at head.
 */
#define RUNS 64

struct run {
	__u64 since;
	__u64 who;
	__u64 stolen; /* what the hypervisor had taken of this CPU until then, ns */
};

struct runs {
	__u64 head;
	__u64 stolen; /* as of a run, when the thread that runs began to */
	__u64 bytes; /* for which the thread that runs, if it is watched, had asked disks when it began to run */
	__u64 woken; /* I/O had woken it */
	struct run run[RUNS];
};

MAP(fl_runs, PERCPU_ARRAY, 1, __u32, struct runs);

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
	__u64 since = take_stamp(&fl_since, pid, now);

	return since < fl_began ? 0 : since;
}

/* When any was last seen to be throttled, ns: spares most waits a look at fl_since. */
__u64 fl_throttled;

/* When a task was last seen to be throttled by what the key says, 0 if not lately. */
__noinline __u64 fl_throttled_at(__u64 key, __u64 now)
{
	return look_stamp(&fl_since, key, now);
}

/* What keeps a task from running whoever else runs, 0 if nothing does. */
static __always_inline __u64 throttled(struct task_struct *t)
{
	struct task_struct___sched *s = (struct task_struct___sched *)t;
	struct sched_rt_entity *se;
	struct rt_rq *q;

	if (s->prio < MAX_DL_PRIO)
		return BPF_CORE_READ_BITFIELD(s, dl.dl_throttled) ? REALTIME : 0;
	if (s->prio >= MAX_RT_PRIO) {
		if (!bpf_core_field_exists(struct cfs_rq, throttle_count))
			return 0; /* a kernel without quotas */
		return t->se.cfs_rq->throttle_count ? QUOTA : 0; /* it counts the groups above, too */
	}
	if (!bpf_core_field_exists(struct sched_rt_entity, rt_rq))
		return 0;
	q = s->rt.rt_rq;
	se = s->rt.parent;
	for (int i = 0; i < BELOW; i++) {
		if (q->rt_throttled)
			return REALTIME;
		if (!se)
			break;
		q = se->rt_rq;
		se = se->parent;
	}
	return 0;
}

/* What would throttle a task, as a key of fl_since: these are no numbers of threads. */
static __always_inline __u64 throttles(struct task_struct *t)
{
	struct task_struct___sched *s = (struct task_struct___sched *)t;

	if (s->prio < MAX_DL_PRIO || !bpf_core_field_exists(struct task_struct___sched, sched_task_group))
		return address(t);
	return address(s->sched_task_group) | (s->prio < MAX_RT_PRIO);
}

/* A task of a watched container waits from now on. */
static __always_inline void begin_wait(struct task_struct *t, __u64 now, __u64 after)
{
	if (throttled(t)) {
		fl_throttled = now;
		fl_wait(throttles(t), now);
	}
	fl_wait(t->pid, (now & ~AFTER) | after);
}

/* For how many bytes a task has asked disks. */
static __always_inline __u64 asked(struct task_struct *t)
{
	struct task_struct___sched *s = (struct task_struct___sched *)t;

	if (!bpf_core_field_exists(struct task_io_accounting, read_bytes))
		return 0;
	return s->ioac.read_bytes + s->ioac.write_bytes;
}

/* What the hypervisor has taken of the CPU of a run queue until now, ns. */
static __always_inline __u64 stolen(struct task_struct *t)
{
	struct rq *rq;

	if (!bpf_core_field_exists(struct cfs_rq___rq, rq))
		return 0;
	rq = ((struct cfs_rq___rq *)t->se.cfs_rq)->rq;
	if (bpf_core_field_exists(struct rq, prev_steal_time_rq))
		return rq->prev_steal_time_rq;
	if (bpf_core_field_exists(struct rq, prev_steal_time))
		return rq->prev_steal_time;
	return 0;
}

/* Says whether a task that sleeps, or has just been woken, waits for I/O by name. */
static __always_inline int waits_for_io(struct task_struct *t)
{
	return BPF_CORE_READ_BITFIELD((struct task_struct___sched *)t, in_iowait);
}

static __always_inline int woken(struct task_struct *t)
{
	__u64 who = owner_of(t), now, after;

	if (who == SYSTEM || !bpf_map_lookup_elem(&fl_watched, &who))
		return 0;
	now = bpf_ktime_get_ns();
	if (waits_for_io(t))
		after = WOKEN;
	else
		after = (fl_end_wait(t->pid, now) & AFTER) == ASLEEP ? WOKEN : OTHER;
	begin_wait(t, now, after);
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

static __always_inline void add_wait(void *waits, struct pair *p, __u64 ns, __u64 io)
{
	struct wait *w = bpf_map_lookup_elem(waits, p), first = { .ns = ns, .io = io, .times = 1 };

	if (!w) {
		if (!bpf_map_update_elem(waits, p, &first, BPF_NOEXIST))
			return;
		w = bpf_map_lookup_elem(waits, p); /* another CPU was first */
	}
	if (!w) {
		__sync_fetch_and_add(&fl_lost.pairs, 1);
		return;
	}
	__sync_fetch_and_add(&w->ns, ns);
	__sync_fetch_and_add(&w->io, io);
	__sync_fetch_and_add(&w->times, 1);
}

/* How a container waited, for fl_blame and fl_waited. */
#define SHOWN 1 /* it is only shown */
#define FOR_IO 2 /* it kept a thread from its I/O */

/* Global, as fl_bucket is. */
__noinline int fl_blame(__u64 victim, __u64 culprit, __u64 ns, __u32 how)
{
	struct pair p = { .victim = victim, .culprit = culprit };
	__u64 io = how & FOR_IO ? ns : 0;

	if (!ns)
		return 0;
	if (how & SHOWN)
		add_wait(&fl_shown, &p, ns, io);
	else
		add_wait(&fl_waits, &p, ns, io);
	return 0;
}

/*
 * Blames the one who ran i runs ago on this CPU for its part of the time from since to
 * end, and the hypervisor for its part of that. Returns when that part began, 0 if the
 * programs have been attached since.
 */
__noinline __u64 fl_blame_run(__u64 victim, __u64 since, __u64 end, __u32 i, __u32 how)
{
	__u64 from, ns, gone, length;
	struct run *run, *next;
	struct runs *r;
	__u32 zero = 0;

	r = bpf_map_lookup_elem(&fl_runs, &zero);
	if (!r)
		return 0; /* for the verifier */
	run = &r->run[(r->head - i) % RUNS];
	next = &r->run[(r->head - i + 1) % RUNS];
	if (run->since < fl_began)
		return 0;
	from = run->since > since ? run->since : since;
	if (from >= end)
		return end;
	ns = end - from;
	gone = (i ? next->stolen : r->stolen) - run->stolen;
	if (gone) {
		length = (i ? next->since : end) - run->since;
		gone = length ? gone * ns / length : 0; /* in proportion */
		if (gone > ns)
			gone = ns;
		fl_blame(victim, STOLEN, gone, how);
	}
	if (run->who != IDLE) /* nobody is in the way where a CPU wakes up */
		fl_blame(victim, run->who, ns - gone, how);
	return from;
}

/*
 * Blames the tasks that ran on this CPU from since to now. A task that waited at another CPU
 * first counts as having waited here all the time.
 */
__noinline int fl_waited(__u64 victim, __u64 since, __u64 now, __u32 how)
{
	for (__u32 i = 0; i < RUNS && now > since; i++) {
		__u64 from = fl_blame_run(victim, since, now, i, how);

		if (!from)
			break;
		now = from;
	}
	if (now > since)
		fl_blame(victim, UNSEEN, now - since, how);
	return 0;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(fl_switch, _Bool preempt, struct task_struct *prev, struct task_struct *next)
{
	__u64 now = bpf_ktime_get_ns(), steal = stolen(next), who, since;
	__u64 was, seen;
	struct switches *w;
	struct runs *r;
	struct run *run;
	__u32 zero = 0, how;

	r = bpf_map_lookup_elem(&fl_runs, &zero);
	if (!r)
		return 0; /* for the verifier */
	who = owner_of(next);
	run = &r->run[r->head % RUNS];
	seen = run->since >= fl_began;
	was = seen ? run->who : SYSTEM;
	if (was != SYSTEM && was != IDLE) {
		w = bpf_map_lookup_elem(&fl_watched, &was);
		if (w) {
			__u64 io = asked(prev) != r->bytes;

			how = (w->shown ? SHOWN : 0) | (io || r->woken ? FOR_IO : 0);
			fl_blame(was, STOLEN, steal - r->stolen, how); /* from itself */
			/* As the kernel counts them: what would go on running did not want to go. */
			if (preempt || !((struct task_struct___sched *)prev)->__state) {
				__sync_fetch_and_add(&w->involuntary, 1);
				if (who != was)
					__sync_fetch_and_add(&w->foreign, 1);
				begin_wait(prev, now, how & FOR_IO ? IO : OTHER);
			} else {
				__sync_fetch_and_add(&w->voluntary, 1);
				/* It does not wait, though a wake-up came before it slept. */
				if (io && !waits_for_io(prev))
					fl_wait(prev->pid, now | ASLEEP);
				else
					fl_end_wait(prev->pid, now);
			}
		}
	}
	r->stolen = steal;
	if (who != SYSTEM && who != IDLE) {
		w = bpf_map_lookup_elem(&fl_watched, &who);
		since = w ? fl_end_wait(next->pid, now) : 0;
		if (w) {
			r->bytes = asked(next);
			r->woken = since && (since & AFTER) == WOKEN;
		}
		if (w && since && (since & AFTER) != ASLEEP) {
			__u64 by = throttled(next), at = 0;
			__u32 index;

			how = (w->shown ? SHOWN : 0) | (since & AFTER ? FOR_IO : 0);
			since &= ~AFTER;
			index = fl_bucket(now - since);
			if (index < HIST_BUCKETS) {
				__sync_fetch_and_add(&w->wait[index], 1);
				__sync_fetch_and_add(&w->wait_sum, now - since);
			}
			if (!by && fl_throttled >= since)
				at = fl_throttled_at(throttles(next), now);
			if (!by && at >= since)
				by = ((struct task_struct___sched *)next)->prio < MAX_RT_PRIO ? REALTIME : QUOTA;
			/*
			 * Who was throttled meanwhile has used up what it may have of that
			 * period: whoever ran took nothing from it.
			 */
			if (by)
				fl_blame(who, by, now - since, how);
			else
				fl_waited(who, since, now, how);
		}
	}
	if (was == who && seen)
		return 0;
	r->head++;
	run = &r->run[r->head % RUNS];
	run->since = now;
	run->who = who;
	run->stolen = steal;
	return 0;
}

#endif
