/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Pools: what packets have cost that are on their way to where it shows whose they
 * are, behind a tunnel's queue or an IFB's.
 */

/* What waits behind a tunnel's queue, or an IFB's, for longer than this was dropped there. */
#define POOL_NS 10000000

/*
 * How many such packets are kept in mind; and how many, of those that are looked
 * at, until one has come out of a tunnel: there may be none, and these the system's.
 */
#define POOL_PACKETS 65536
#define TUNNEL_FIRST 64

/* Takes n packets' part of what is in a pool, and gives how many there were. */
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

/* What a packet has cost on its way to the IFB from whose tasklet it comes now. */
static __always_inline __u64 deferred(struct cpu *c)
{
	__u64 ns = 0;

	if (c->from_ifb && c->ifb.packets)
		take(&c->ifb, c->weight, &ns);
	c->from_ifb = 0;
	return ns;
}

/* A packet has got into an IFB: the open one, or one that has waited in its queue. */
static __always_inline void defer(struct cpu *c)
{
	c->deferred++;
	c->ifb.packets += c->weight;
	c->ifb.seen = c->last;
}

#define SECOND 1000000000ULL

/*
 * Whether a tunnel brings packets to this CPU: one has come out of its device of
 * late. Packets that look as a tunnel's anybody can send.
 */
static __always_inline int tunnelled(struct cpu *c, __u64 now)
{
	return c->tunnel_used && now - c->tunnel_used < SECOND;
}

/* What has waited in a pool for too long, or too much, is the system's. */
static __always_inline void drop_pool(struct cpu *c, struct pool *p, __u64 now, __u64 most, __u32 class)
{
	if (!p->ns || (p->packets && now - p->seen < POOL_NS && p->packets < most))
		return;
	system_time(c, RECEIVE | class, p->ns);
	p->ns = 0;
	p->packets = 0;
}

static __always_inline void drop_pools(struct cpu *c, __u64 now)
{
	__u64 most = tunnelled(c, now) ? POOL_PACKETS : TUNNEL_FIRST * c->weight;
	__u32 kind = c->kind, victim = c->victim;

	/* It was not spent in this run: who is interrupted now has not lost it. */
	c->kind = KIND_IDLE;
	c->victim = 0;
	drop_pool(c, &c->tunnel, now, most, ENCAPSULATED);
	drop_pool(c, &c->ifb, now, POOL_PACKETS, OTHER);
	c->kind = kind;
	c->victim = victim;
}
