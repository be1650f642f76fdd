/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The table of a CPU, which adds up intervals.
 *
 * The functions here and in the other headers that are not static are global
 * functions of BPF. The kernel verifies each of them once, and not again for every
 * state in which it is called. That is a twentieth of the work (it was 900,000
 * instructions, most of a second of the agent's start). The price: the verifier
 * assumes that a pointer may be 0, and each function has to return a number.
 */

/*
 * Entry keys. Bit 63 distinguishes the key of slot 0, class 0 from a free entry.
 * slot 0-15, class 16-23, victim 24-39, kind 40-47.
 */
#define KEY_USED (1ULL << 63)

static __always_inline __u64 key_of(struct cpu *c, __u32 slot, __u32 class)
{
	__u64 kind = c->kind == KIND_TASK && slot && slot == c->peer ? KIND_PEER : c->kind;

	return KEY_USED | kind << 40 | (__u64)c->victim << 24 | (__u64)class << 16 | slot;
}

static __always_inline void owes(__u32 slot, __s64 ns)
{
	__s64 *charge = slot ? bpf_map_lookup_elem(&fl_charges, &slot) : 0;

	if (charge)
		__sync_fetch_and_add(charge, ns);
}

/* A run may interrupt fl_flush and flush the entry itself: each number is taken out once. */
static __always_inline void flush_entry(struct cpu *c, struct entry *e)
{
	__u32 slot = e->key & 0xffff, class = e->key >> 16 & 7;
	__u32 victim = e->key >> 24 & 0xffff, kind = e->key >> 40 & 0xff;
	struct theft t = {.victim = victim, .kind = kind, .culprit = slot};
	struct account *a, *whose;
	struct work *w;
	__u64 *ns, first = __sync_lock_test_and_set(&e->ns, 0);

	a = bpf_map_lookup_elem(&fl_accounts, &slot);
	if (!a)
		return; /* impossible: slots are below MAX_SLOTS */
	w = &a->by[class];
	__sync_fetch_and_add(&w->ns, first);
	__sync_fetch_and_add(&w->packets, __sync_lock_test_and_set(&e->packets, 0));
	__sync_fetch_and_add(&w->bytes, __sync_lock_test_and_set(&e->bytes, 0));
	if (slot && slot == victim) {
		__sync_fetch_and_add(&a->own, first);
		return; /* its packets ran in its own time */
	}
	if (!first)
		return;
	/* Charge and credit use these sums: unlike fl_thefts, they always have room. */
	if (kind == KIND_TASK || kind == KIND_PEER || kind == KIND_KSOFTIRQD)
		__sync_fetch_and_add(&a->took, first);
	whose = victim && (kind == KIND_TASK || kind == KIND_PEER) ? bpf_map_lookup_elem(&fl_accounts, &victim) : 0;
	if (whose)
		__sync_fetch_and_add(&whose->robbed, first);
	ns = bpf_map_lookup_elem(&fl_thefts, &t);
	if (!ns && bpf_map_update_elem(&fl_thefts, &t, &first, BPF_NOEXIST)) {
		/* Another CPU has just added the pair, or the map is full. */
		ns = bpf_map_lookup_elem(&fl_thefts, &t);
		if (!ns)
			c->lost++;
	}
	if (ns)
		__sync_fetch_and_add(ns, first);
	owes(slot, first);
	owes(victim, -first);
}

/* Divides the pot among the packets of the run so far; the first gets the rounding. */
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
		if (c->run) /* else a run may just have added to it, and the next one may */
			__builtin_memset(e, 0, sizeof(*e));
	}
	return 0;
}

/* Finds or adds the entry with a key, and returns its index. */
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

/*
 * The time in ns of these programs for each packet that counts, which is not the packet's. User
 * space measures it between windows (estimate.go). 0: not known, or all time is to be seen.
 */
__u64 fl_own;

/* The interval that begins now is work for a packet of slot. */
static __always_inline struct entry *use(struct cpu *c, __u32 slot, __u32 class, __u64 packets, __u64 bytes)
{
	struct entry *e = entry(c, slot, class);

	e->packets += packets * c->weight;
	e->bytes += bytes * c->weight;
	if (packets)
		c->own += fl_own;
	c->cur = c->found;
	c->owner = slot;
	return e;
}

/* A packet of an entry gets a share of the pot. */
static __always_inline void share(struct cpu *c, struct entry *e)
{
	e->shares++;
	c->shares++;
}
