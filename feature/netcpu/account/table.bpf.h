/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The table of a CPU, in which intervals are added up.
 *
 * What is not static here and in the other headers is a global function of BPF: the
 * kernel verifies it once, by itself, and not again for all that may be known where
 * it is called. That is a twentieth of the work (900,000 instructions, most of a
 * second of an agent's start). The price is that a pointer may be 0, as far as it
 * knows, and that each returns a number.
 */

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
	if (!ns && bpf_map_update_elem(&fl_thefts, &t, &first, BPF_NOEXIST)) {
		/* Another CPU has just added the pair, or the map is full. */
		ns = bpf_map_lookup_elem(&fl_thefts, &t);
		if (!ns)
			c->lost++;
	}
	if (ns)
		*ns += e->ns;
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
