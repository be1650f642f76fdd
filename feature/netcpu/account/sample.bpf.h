/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sampling: which runs of a busy CPU are sampled, and what the others are charged. */

/*
 * EVENTS is about the most events per second that a CPU handles; they cost one
 * percent of it. At least RUNS runs per second are sampled in any case, so that the
 * charges of a second are right within some percent. WINDOW_NS is the reaction time.
 */
#define EVENTS 8000ULL
#define RUNS 2000ULL
#define WINDOW_NS 4000000ULL

/*
 * The programs are attached for a window, a small part of the time. Then all runs are sampled,
 * as the windows are the sample.
 */
__u8 fl_window;

/*
 * Between windows only fl_enter and fl_exit are attached. They show how long softirqs take without
 * the time of the others, by one in fl_bare, so that they cost little. 0: in a window.
 */
__u8 fl_bare;

/* Chooses the weight of the next runs from the events of a window. */
static __always_inline void weigh(struct cpu *c, __u64 now)
{
	__u64 length = now - c->window, busy, enough;
	__u32 weight = 1;
	int i;

	if (length < WINDOW_NS)
		return;
	busy = c->events * (SECOND / EVENTS) / length;
	enough = c->runs * (SECOND / RUNS) / length;
	if (busy > enough)
		busy = enough;
	/* Packets behind a tunnel's queue can be matched only if all runs are sampled. */
	if (fl_exact || fl_window || tunnelled(c, now))
		busy = 0;
	for (i = 0; i < 6 && 2 * weight <= busy; i++)
		weight *= 2;
	c->weight = weight;
	c->window = now;
	c->events = 0;
	c->runs = 0;
}

/*
 * Chooses one in so many, a power of two. The choice is random, so that periodic
 * traffic is counted neither too often nor never.
 */
static __always_inline int chosen(struct cpu *c, __u32 of)
{
	c->chance = c->chance * 1664525 + 1013904223;
	return !((c->chance >> 16) & (of - 1));
}

/* Whether to sample the run that begins. */
static __always_inline int sampled(struct cpu *c)
{
	if (!c->weight)
		c->weight = 1;
	return chosen(c, c->weight);
}

/* Tells the time until a thread sleeps, or another runs, from other times on its CPU. */
static __always_inline __u64 stint(void)
{
	struct task_struct *t = (void *)bpf_get_current_task_btf();

	return (__u64)t->pid << 32 | (__u32)(t->nvcsw + t->nivcsw);
}

/*
 * Adds the measured time of a run that is not sampled. A sampled run is longer than
 * the runs that it stands for, by the time of these programs: by some 20 % if each
 * has one packet. So those runs are charged by their own time.
 */
static __always_inline void pass(struct cpu *c, __u64 now)
{
	__u64 ns = now - c->skip_at;
	__u32 run = c->skip;

	c->skip = 0;
	if (fl_bare) {
		if (run == NET_RX_SOFTIRQ || run == NET_TX_SOFTIRQ)
			c->bare += ns * fl_bare;
		return;
	}
	if (run == RUN_THREAD) {
		if (c->stint != stint())
			return; /* the thread slept meanwhile */
	} else if (!c->network && run != NET_RX_SOFTIRQ && run != NET_TX_SOFTIRQ) {
		return; /* a tasklet or timer without packets */
	}
	c->passed += ns;
	c->owed += ns;
}

/*
 * The longest interval: the work for one packet, or for all that a timer sends. The
 * rest of a longer one has another cause, such as the hypervisor, and does not
 * count for other runs.
 */
#define INTERVAL_NS 1000000ULL

#define RATIO_ONE 1024
#define RATIO_LEAST (RATIO_ONE / 4)
#define RATIO_MOST (RATIO_ONE * 4)

/*
 * Sampled runs after which rate() sets ratio anew. There are at least RUNS of them
 * per second.
 */
#define LOOKED 128

/* Sets the ratio by which other runs are charged, so that owed returns to zero. */
static __always_inline void rate(struct cpu *c)
{
	__s64 due;

	c->owed -= c->counted;
	c->stood += c->stands;
	if (c->weight <= 1 || ++c->looked < LOOKED || !c->stood)
		return;
	due = c->passed + c->owed;
	c->ratio = due > 0 ? due * RATIO_ONE / c->stood : 0;
	if (c->ratio < RATIO_LEAST)
		c->ratio = RATIO_LEAST;
	if (c->ratio > RATIO_MOST)
		c->ratio = RATIO_MOST;
	c->looked = 0;
	c->passed = 0;
	c->stood = 0;
}
