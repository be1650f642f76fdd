/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sampling: which runs of a busy CPU are looked at, and what the others count. */

/*
 * The events that are looked at in a second on one CPU, at most, about: what
 * they cost is then a percent of it. But as many runs are looked at in any case,
 * so that what is charged in a second is right within some percent. WINDOW_NS is
 * how long it takes to notice.
 */
#define EVENTS 8000ULL
#define RUNS 2000ULL
#define WINDOW_NS 4000000ULL

/* Whether all runs are looked at, however busy a CPU is; set before it is loaded. */
const volatile __u8 fl_exact;

/* Chooses the weight of the runs to come by what those of a window brought. */
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
	/* What waits behind a tunnel is told by all packets, not by some. */
	if (fl_exact || tunnelled(c, now))
		busy = 0;
	for (i = 0; i < 6 && 2 * weight <= busy; i++)
		weight *= 2;
	c->weight = weight;
	c->window = now;
	c->events = 0;
	c->runs = 0;
}

/*
 * Whether the run that begins is looked at. That it is by chance keeps traffic
 * with a beat of its own from being counted too often, or never.
 */
static __always_inline int sampled(struct cpu *c)
{
	if (c->weight <= 1) {
		c->weight = 1;
		return 1;
	}
	c->chance = c->chance * 1664525 + 1013904223;
	return !((c->chance >> 16) & (c->weight - 1));
}

/*
 * A run was not looked at; but it was measured. That it is charged as it was,
 * and not as those were that stand for it, matters: they are longer by what
 * looking takes, some 20 % where each has one packet.
 */
static __always_inline void pass(struct cpu *c, __u64 now)
{
	__u64 ns = now - c->skip_at;

	if (c->skip == RUN_THREAD) {
		struct task_struct *t = (void *)bpf_get_current_task_btf();

		if (c->pid != t->pid || c->switches != t->nvcsw + t->nivcsw)
			return; /* it has slept meanwhile */
	} else if (!c->network && c->skip != NET_RX_SOFTIRQ && c->skip != NET_TX_SOFTIRQ) {
		return; /* somebody else's tasklet or timer */
	}
	c->passed += ns;
	c->owed += ns;
}

/*
 * What an interval can take: one packet's work, or all that a timer sends. What
 * is longer was something else's, a hypervisor's say, and does not stand for
 * other runs.
 */
#define INTERVAL_NS 1000000ULL

#define RATIO_ONE 1024
#define RATIO_LEAST (RATIO_ONE / 4)
#define RATIO_MOST (RATIO_ONE * 4)

/*
 * After how many runs that were looked at ratio is chosen anew. They come
 * at RUNS a second and more.
 */
#define LOOKED 128

/* Chooses how much those count that are not looked at, so that nothing stays owed. */
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
