/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Runs and intervals: how they end, and which account their time goes to. */

/*
 * The end of a run flushes the table if the last flush is this long ago. That saves
 * three map updates per run.
 */
#define FLUSH_NS 1000000

/* Charges an open packet after its owner stayed unknown. */
static __always_inline void done_with(struct cpu *c, struct ringed *r)
{
	struct entry *e;

	if (!r->ns)
		return;
	e = entry(c, r->slot, RECEIVE | OTHER);
	e->ns += r->ns;
	if (r->slot) /* otherwise the rest of the run would go to the system */
		share(c, e);
	r->skb = 0;
	r->ns = 0;
}

static __always_inline void drop_ring(struct cpu *c)
{
	int i;

	if (!c->in_ring)
		return;
	for (i = 0; i < RING; i++)
		done_with(c, &c->ring[i]);
	c->in_ring = 0;
}

static __always_inline __u32 class_of(__u8 protocol)
{
	switch (protocol) {
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
		return UDP;
	case IPPROTO_TCP:
		return TCP;
	case IPPROTO_IPIP:
	case IPPROTO_IPV6:
	case IPPROTO_GRE:
	case IPPROTO_ESP:
		return ENCAPSULATED;
	}
	return OTHER;
}

/*
 * The open packet turns out to belong to slot. So does its time so far, its part of
 * the first pass over a list, and the part of the tunnel that brought it. If skb is
 * 0, the packet is not known, and the oldest of the list counts. The interval goes
 * on and belongs to slot from its beginning, so the clock need not be read.
 */
static __noinline void settle(struct cpu *c, __u32 slot, __u32 class, __u64 skb, __u32 packets)
{
	__u64 ns = 0, part;
	struct entry *e;
	int i;

	if (c->in_ring) {
		for (i = 0; i < RING; i++) {
			struct ringed *r = &c->ring[(c->ringed + i) & (RING - 1)];

			if (!r->ns || (skb && r->skb != skb))
				continue;
			ns += r->ns;
			r->ns = 0;
			r->skb = 0;
			break;
		}
	}
	if (c->inner && c->tunnel.packets) {
		e = entry(c, slot, RECEIVE | ENCAPSULATED);
		e->packets += take(&c->tunnel, (skb ? c->inner : 1) * c->weight, &part);
		c->own += fl_own;
		e->ns += part;
	}
	ns += deferred(c);
	e = use(c, slot, class, packets, packets ? c->bytes : 0);
	e->ns += ns;
	if (slot) /* otherwise the rest of the run would go to the system */
		share(c, e);
}

/*
 * Settles the open packet if a program reported its fate (fate.h): dropped or redirected,
 * it counts like one that a device of the tenant receives. No part of it waits in the
 * queue of a tunnel.
 */
static __noinline int told(struct cpu *c)
{
	struct fl_fate f = fl_take_fate();

	if (!f.fate)
		return 0;
	if (f.fate == FL_HANDED) {
		c->proto = class_of(f.protocol);
		c->bytes = f.bytes;
	}
	settle(c, of_tenant(f.tenant), RECEIVE | c->proto, c->skb, 1);
	return 1;
}

/* Ends the interval of an open packet if its owner is still unknown. */
__noinline int leave_open(struct cpu *c, __u64 ns)
{
	struct ringed *r;
	__u32 whose;

	if (!c)
		return 0;
	if (told(c)) {
		c->entries[c->cur & (ENTRIES - 1)].ns += ns;
		return 0;
	}
	if (c->to_ifb) {
		c->ifb.ns += ns;
		return 0;
	}
	ns += deferred(c);
	if (c->outer) {
		c->tunnel.ns += ns;
		c->tunnel.packets += c->weight;
		c->tunnel.seen = c->last;
		return 0;
	}
	/*
	 * A packet in a namespace that user space does not know belongs to the container
	 * that made the namespace. If no sender is known either, the victim pays. So no
	 * container gets credit for what may be its own packet.
	 */
	whose = c->nested ? c->victim : 0;
	if (c->proto == OTHER) {
		struct entry *e = entry(c, whose, RECEIVE | OTHER);

		e->ns += ns;
		e->packets += c->weight;
		share(c, e);
		return 0;
	}
	/*
	 * Either the packet is done, and belongs to the system, for example. Or it is
	 * part of a list, which the protocol handles after the last one was received.
	 */
	r = &c->ring[c->ringed++ & (RING - 1)];
	done_with(c, r);
	r->skb = c->skb;
	r->ns = ns;
	r->slot = whose;
	c->in_ring = 1;
	return 0;
}

static __always_inline void close(struct cpu *c, __u64 now)
{
	__u64 ns = now - c->last;

	/* Another packet may cost less: half of its time stays, so that none is free. */
	ns -= c->own < ns / 2 ? c->own : ns / 2;
	c->own = 0;
	c->last = now;
	if (c->weight > 1) {
		__u64 others = (ns < INTERVAL_NS ? ns : INTERVAL_NS) * (c->weight - 1);

		c->stands += others;
		others = others * (c->ratio ? c->ratio : RATIO_ONE) / RATIO_ONE;
		c->counted += others;
		ns += others;
	}
	c->spent += ns;
	if (c->cur < ENTRIES)
		c->entries[c->cur & (ENTRIES - 1)].ns += ns;
	else if (c->cur == OPEN)
		leave_open(c, ns);
	else
		c->pot += ns;
}

__noinline int end(struct cpu *c, __u64 now)
{
	__u32 dev = 0;

	if (!c)
		return 0;
	close(c, now);
	if (!c->network && c->run != NET_RX_SOFTIRQ && c->run != NET_TX_SOFTIRQ) {
		c->run = 0;
		return 0; /* a tasklet or timer without packets */
	}
	drop_ring(c);
	drop_pools(c, now);
	if (c->deferred) {
		/* Their part of the driver's work, of GRO and of the IFB's own queue. */
		__u64 part = c->pot / (c->shares + c->deferred) * c->deferred;

		c->ifb.ns += part;
		c->pot -= part;
	}
	if (c->shares)
		share_pot(c);
	else if (c->run == NET_RX_SOFTIRQ && !c->network && !c->steered && c->sent_ifindex)
		dev = device_at(c, c->sent_netns, c->sent_ifindex);
	if (dev & NESTED && !(dev & SLOT))
		dev |= c->victim; /* see leave_open() */
	if (dev & SLOT) {
		/*
		 * The run received nothing: it handed a packet that was sent into a veth
		 * here to the CPU that RPS chose.
		 */
		entry(c, dev & SLOT, (dev & HOST_END ? RECEIVE : SEND) | OTHER)->ns += c->pot;
		c->sent_ifindex = 0;
	} else if (c->pot)
		entry(c, 0, (c->run == NET_TX_SOFTIRQ ? SEND : RECEIVE) | OTHER)->ns += c->pot;
	if (c->run == RUN_THREAD)
		c->thread += c->spent;
	else
		c->softirq += c->spent;
	if (c->run == NET_RX_SOFTIRQ || c->run == NET_TX_SOFTIRQ)
		c->whole += c->spent - c->before;
	rate(c);
	weigh(c, now);
	if (now - c->flushed > FLUSH_NS) {
		flush(c);
		c->flushed = now;
	}
	barrier();
	c->run = 0; /* last: from here on fl_flush may interrupt */
	return 0;
}
