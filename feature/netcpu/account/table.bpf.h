/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Runs, intervals, and the table of a CPU in which they are added up.
 *
 * What is not static here, in device.bpf.h and in packet.bpf.h is a global function
 * of BPF: the kernel verifies it once, by itself, and not again for all that may be
 * known where it is called. That is a twentieth of the work (900,000 instructions,
 * most of a second of an agent's start). The price is that a pointer may be 0, as
 * far as it knows, and that each returns a number.
 */

/*
 * The table goes into the maps at the end of the first run that ends this long
 * after the last time. What is spared is three map updates per run.
 */
#define FLUSH_NS 1000000

/*
 * An interrupt's softirqs begin right after it, before anything else can run.
 * What begins later has another cause.
 */
#define FOLLOWS_NS 2000

/* What waits behind a tunnel's queue, or an IFB's, for longer than this was dropped there. */
#define POOL_NS 10000000

/*
 * How many such packets are kept in mind; and how many, of those that are looked
 * at, until one has come out of a tunnel: there may be none, and these the system's.
 */
#define POOL_PACKETS 65536
#define TUNNEL_FIRST 64

/*
 * Entry keys. Bit 63 tells the key of slot 0, class 0 from a free entry.
 * slot 0-15, class 16-23, victim 24-39, kind 40-47.
 */
#define KEY_USED (1ULL << 63)

static __always_inline __u64 key_of(struct cpu *c, __u32 slot, __u32 class)
{
	return KEY_USED | (__u64)c->kind << 40 | (__u64)c->victim << 24 | (__u64)class << 16 | slot;
}

static __always_inline void flush_entry(struct cpu *c, struct entry *e)
{
	__u32 slot = e->key & 0xffff, class = e->key >> 16 & 7;
	__u32 victim = e->key >> 24 & 0xffff, kind = e->key >> 40 & 0xff;
	struct theft t = {};
	struct account *a, *whose;
	struct work *w;
	__u64 *ns, first = e->ns; /* a copy: in 6.1 a map takes nothing of a global function's memory */
	__s64 *charge;

	a = bpf_map_lookup_elem(&fl_accounts, &slot);
	if (!a)
		return; /* cannot be: slots are below MAX_SLOTS */
	w = &a->by[class];
	w->ns += e->ns;
	w->packets += e->packets;
	w->bytes += e->bytes;
	if (slot && slot == victim) {
		a->own += e->ns;
		return; /* its own work at its own expense */
	}
	if (!e->ns)
		return;
	/* What is charged and credited goes by these: there is room for them. */
	if (kind == KIND_TASK || kind == KIND_KSOFTIRQD)
		a->took += e->ns;
	whose = victim && kind == KIND_TASK ? bpf_map_lookup_elem(&fl_accounts, &victim) : 0;
	if (whose)
		whose->robbed += e->ns;
	t.victim = victim;
	t.kind = kind;
	t.culprit = slot;
	ns = bpf_map_lookup_elem(&fl_thefts, &t);
	if (ns)
		*ns += e->ns;
	else if (bpf_map_update_elem(&fl_thefts, &t, &first, BPF_NOEXIST))
		c->lost++;
	if (slot) {
		charge = bpf_map_lookup_elem(&fl_charges, &slot);
		if (charge)
			__sync_fetch_and_add(charge, e->ns);
	}
	if (victim) {
		charge = bpf_map_lookup_elem(&fl_charges, &victim);
		if (charge)
			__sync_fetch_and_add(charge, -e->ns);
	}
}

/* Shares the pot over the packets of the run so far; rounding goes to the first. */
static __always_inline void share_pot(struct cpu *c)
{
	__u64 each, rest;
	int i;

	if (!c->shares)
		return;
	each = c->pot / c->shares;
	rest = c->pot - each * c->shares;
	for (i = 0; i < ENTRIES; i++) {
		struct entry *e = &c->entries[i];

		if (!e->key)
			break;
		if (!e->shares)
			continue;
		e->ns += each * e->shares + rest;
		rest = 0;
		e->shares = 0;
	}
	c->pot = 0;
	c->shares = 0;
}

__noinline int flush(struct cpu *c)
{
	int i;

	if (!c)
		return 0;
	for (i = 0; i < ENTRIES; i++) {
		struct entry *e = &c->entries[i];

		if (!e->key)
			break;
		flush_entry(c, e);
		__builtin_memset(e, 0, sizeof(*e));
	}
	return 0;
}

/* The entry of a culprit and class for the run's victim. */
__noinline __u32 find(struct cpu *c, __u64 key)
{
	__u32 i;

	if (!c)
		return 0;
	for (i = 0; i < ENTRIES; i++) {
		struct entry *e = &c->entries[i];

		if (e->key == key)
			return i;
		if (!e->key) {
			e->key = key;
			return i;
		}
	}
	share_pot(c);
	flush(c);
	c->entries[0].key = key;
	return 0;
}

static __always_inline struct entry *entry(struct cpu *c, __u32 slot, __u32 class)
{
	__u64 key = key_of(c, slot, class);
	__u32 i = c->cur & (ENTRIES - 1);

	if (c->entries[i].key != key)
		i = find(c, key) & (ENTRIES - 1);
	c->found = i;
	return &c->entries[i];
}

/* The interval that begins now is work for a packet of slot's. */
static __always_inline void use(struct cpu *c, __u32 slot, __u32 class, __u64 packets, __u64 bytes)
{
	struct entry *e = entry(c, slot, class);

	e->packets += packets * c->weight;
	e->bytes += bytes * c->weight;
	c->cur = c->found;
	c->owner = slot;
}

/* A packet of slot's has its share of the pot. */
static __always_inline void share(struct cpu *c)
{
	c->entries[c->cur & (ENTRIES - 1)].shares++;
	c->shares++;
}

/* Time that is nobody's. */
static __always_inline void system_time(struct cpu *c, __u32 class, __u64 ns)
{
	entry(c, 0, class)->ns += ns;
}

/* An open packet of which nothing told whose it was. */
static __always_inline void done_with(struct cpu *c, struct ringed *r)
{
	struct entry *e;

	if (!r->ns)
		return;
	e = entry(c, r->slot, RECEIVE | OTHER);
	e->ns += r->ns;
	if (r->slot) { /* or the rest of the run would be the system's */
		e->shares++;
		c->shares++;
	}
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

	if (c->run == TASKLET_SOFTIRQ && c->ifb.packets)
		take(&c->ifb, c->weight, &ns);
	return ns;
}

/* The interval of an open packet is over, and nothing told whose it was. */
__noinline int leave_open(struct cpu *c, __u64 ns)
{
	struct ringed *r;
	__u32 slot, whose;

	if (!c)
		return 0;
	slot = dropped();
	if (slot) {
		struct entry *e = entry(c, slot, RECEIVE | c->proto);

		e->ns += ns;
		e->packets += c->weight;
		e->bytes += c->bytes * c->weight;
		e->shares++;
		c->shares++;
		return 0;
	}
	if (!c->to_ifb)
		ns += deferred(c);
	if (c->outer || c->to_ifb) {
		struct pool *p = c->to_ifb ? &c->ifb : &c->tunnel;

		p->ns += ns;
		p->packets += c->weight;
		p->seen = c->last;
		return 0;
	}
	/*
	 * What comes in a namespace that user space does not know was put there by
	 * who has made it. If not even a sender is known, it is whose time it takes,
	 * so that nobody gets credit for what may be its own.
	 */
	whose = c->nested ? c->victim : 0;
	if (c->proto == OTHER) {
		struct entry *e = entry(c, whose, RECEIVE | OTHER);

		e->ns += ns;
		e->packets += c->weight;
		e->shares++;
		c->shares++;
		return 0;
	}
	/*
	 * Either it is done with, and the system's, say; or it stands in a list that
	 * the protocol works through after the last one has been received.
	 */
	r = &c->ring[c->ringed++ & (RING - 1)];
	done_with(c, r);
	r->skb = c->skb;
	r->ns = ns;
	r->slot = whose;
	c->in_ring = 1;
	return 0;
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

static __always_inline void close(struct cpu *c, __u64 now)
{
	__u64 ns = now - c->last;

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
	if (!p->ns || (now - p->seen < POOL_NS && p->packets < most))
		return;
	system_time(c, RECEIVE | class, p->ns);
	p->ns = 0;
	p->packets = 0;
}

static __always_inline void drop_pools(struct cpu *c, __u64 now)
{
	__u64 most = tunnelled(c, now) ? POOL_PACKETS : TUNNEL_FIRST * c->weight;

	drop_pool(c, &c->tunnel, now, most, ENCAPSULATED);
	drop_pool(c, &c->ifb, now, POOL_PACKETS, OTHER);
}

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

__noinline int end(struct cpu *c, __u64 now)
{
	__u32 dev = 0;

	if (!c)
		return 0;
	close(c, now);
	if (!c->network && c->run != NET_RX_SOFTIRQ && c->run != NET_TX_SOFTIRQ) {
		c->run = 0;
		return 0; /* somebody else's tasklet or timer */
	}
	drop_ring(c);
	drop_pools(c, now);
	if (c->shares)
		share_pot(c);
	else if (c->run == NET_RX_SOFTIRQ && !c->network && !c->steered && c->sent_ifindex)
		dev = device_at(c, c->sent_netns, c->sent_ifindex);
	if (dev & NESTED && !(dev & SLOT))
		dev |= c->victim; /* see leave_open() */
	if (dev & SLOT) {
		/*
		 * Nothing was received: what was sent into a veth here is handed on
		 * to the CPU that RPS chose for it.
		 */
		entry(c, dev & SLOT, (dev & HOST_END ? RECEIVE : SEND) | OTHER)->ns += c->pot;
		c->sent_ifindex = 0;
	} else if (c->deferred) {
		/* The driver's work, GRO's, and that of the IFB's own queue. */
		c->ifb.ns += c->pot;
		c->ifb.seen = now;
	} else if (c->pot)
		system_time(c, (c->run == NET_TX_SOFTIRQ ? SEND : RECEIVE) | OTHER, c->pot);
	if (c->run == RUN_THREAD)
		c->thread += c->spent;
	else
		c->softirq += c->spent;
	rate(c);
	weigh(c, now);
	if (now - c->flushed > FLUSH_NS) {
		flush(c);
		c->flushed = now;
	}
	barrier();
	c->run = 0; /* the last thing: now fl_flush may come */
	return 0;
}
