/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Pools: the cost so far of packets that wait in the queue of a tunnel or an IFB,
 * before their owner is known.
 */

#define SECOND 1000000000ULL

/*
 * For tests that count every packet: sample all runs, however busy a CPU is, and take
 * no packet for dropped that waits less than so many seconds, as ksoftirqd may for an
 * emulated CPU; set before the object is loaded.
 */
const volatile __u8 fl_exact;

/* A packet that waits longer than this in such a queue was dropped there. */
#define POOL_NS (fl_exact ? fl_exact * SECOND : SECOND / 100)

/*
 * The most packets in a pool, and the most of a tunnel's (in sampled packets) before
 * a tunnel device has received one: there may be no tunnel, and then the system pays.
 */
#define POOL_PACKETS 65536
#define TUNNEL_FIRST 64

/* Takes the part of n packets out of a pool, and returns how many there were. */
static __always_inline __u64 take(struct pool *p, __u64 n, __u64 *ns)
{
	__u64 part = p->ns;

	if (n < p->packets)
		part = p->ns / p->packets * n;
	else
		n = p->packets;
	*ns = part;
	p->ns -= part;
	p->packets -= n;
	return n;
}

/* Returns a packet's cost before the IFB that receives it now, in its tasklet. */
static __always_inline __u64 deferred(struct cpu *c)
{
	__u64 ns = 0;

	if (c->from_ifb && c->ifb.packets)
		take(&c->ifb, c->weight, &ns);
	c->from_ifb = 0;
	return ns;
}

/* A packet enters an IFB: the open one, or one from the IFB's own queue. */
static __always_inline void defer(struct cpu *c)
{
	c->deferred++;
	c->ifb.packets += c->weight;
	c->ifb.seen = c->last;
}

/*
 * Whether a tunnel device received packets on this CPU in the last second. Anybody
 * can send packets that look encapsulated, so those prove nothing.
 */
static __always_inline int tunnelled(struct cpu *c, __u64 now)
{
	return c->tunnel_used && now - c->tunnel_used < SECOND;
}

/* Charges a pool that is too old or too large to the system. */
static __always_inline void drop_pool(struct cpu *c, struct pool *p, __u64 now, __u64 most, __u32 class)
{
	if (!p->ns || (p->packets && now - p->seen < POOL_NS && p->packets < most))
		return;
	entry(c, 0, RECEIVE | class)->ns += p->ns;
	p->ns = 0;
	p->packets = 0;
}

static __always_inline void drop_pools(struct cpu *c, __u64 now)
{
	__u64 most = tunnelled(c, now) ? POOL_PACKETS : TUNNEL_FIRST * c->weight;
	__u32 kind = c->kind, victim = c->victim;

	/* The time was not spent in this run: its victim did not lose it. */
	c->kind = KIND_IDLE;
	c->victim = 0;
	drop_pool(c, &c->tunnel, now, most, ENCAPSULATED);
	drop_pool(c, &c->ifb, now, POOL_PACKETS, OTHER);
	c->kind = kind;
	c->victim = victim;
}
