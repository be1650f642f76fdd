/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The stamps of packets under way: admission and look-up. */

/* At most one in this many packets is admitted, so that sampling recovers soon after a flood. */
#define MOST_GAP 128

static __always_inline struct cpu *this_cpu(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fl_cpus, &zero);
}

static __always_inline struct tally *tally_of(__u32 slot, __u32 direction, __u32 protocol)
{
	__u32 index = direction * PROTOCOLS + protocol;
	void *of;

	slot &= SLOT;
	of = bpf_map_lookup_elem(&fl_tallies, &slot);
	return of ? bpf_map_lookup_elem(of, &index) : 0;
}

static __always_inline void increment(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

/*
 * Emits a record to user space. The reader polls: waking it would add an interrupt between
 * the packet's stamp and the driver, which would count as time of the network.
 */
__noinline int fl_emit(const struct record *r)
{
	if (r && bpf_ringbuf_output(&fl_records, (void *)r, sizeof(*r), BPF_RB_NO_WAKEUP))
		increment(&fl_lost);
	return 0;
}

/*
 * Limits the records of a tenant, direction and protocol in one window of time, so that a
 * flood neither displaces records of others nor takes the agent's time.
 */
#define MAX_EMITTED 335 /* 20,000 in a second */
static __always_inline int may_emit(struct tally *t, __u64 now)
{
	__u32 window = now >> WINDOW_BITS;

	if (t->window != window) {
		t->window = window;
		t->emitted = 0;
	}
	if (__sync_fetch_and_add(&t->emitted, 1) < MAX_EMITTED)
		return 1;
	increment(&fl_lost);
	return 0;
}

/* Returns 0 for a negative difference: clocks of two CPUs may differ a little. */
static __always_inline __u64 between(__u64 from, __u64 to)
{
	return (__s64)(to - from) > 0 ? to - from : 0;
}

static __always_inline void count(struct tally *t, __u32 stage, __u64 ns)
{
	__u32 bucket;

	if (ns == NONE || stage >= STAGES)
		return;
	bucket = fl_bucket(ns);
	if (bucket >= HIST_BUCKETS)
		return; /* for the verifier */
	__sync_fetch_and_add(&t->stage[stage].sum, ns);
	increment(&t->stage[stage].count[bucket]);
}

/*
 * Reports whether one more packet may begin on this CPU. After a window of time with more
 * than fl_budget packets, a random sample of that size is admitted; the first busy window
 * admits at most four times as many. Passing a packet over takes few instructions, because
 * in a flood nearly all packets are passed over.
 */
static __always_inline int admit(struct cpu *c)
{
	__u64 jiffy = bpf_jiffies64(), offered;

	if (c->jiffy != jiffy) {
		c->jiffy = jiffy;
		c->now = bpf_ktime_get_ns();
		if (c->passed != c->before)
			fl_passed_at = c->now; /* rarely: all CPUs share it */
		if ((c->now - c->window) >> WINDOW_BITS) {
			offered = c->begun + c->passed - c->before;
			c->gap = offered <= fl_budget ? 0 : offered / fl_budget;
			if (c->gap > MOST_GAP)
				c->gap = MOST_GAP;
			if (!c->gap)
				c->skip = 0;
			c->window = c->now;
			c->before = c->passed;
			c->begun = 0;
		}
	}
	if (c->skip) {
		c->skip--;
	} else if (c->begun < 4 * fl_budget) {
		c->begun++;
		if (c->gap)
			c->skip = bpf_get_prandom_u32() % (2 * c->gap + 1);
		return 1;
	}
	c->passed++;
	return 0;
}

/* Returns the stamp at an index of fl_stamps. */
static __always_inline struct stamp *stamp_at(__u32 index)
{
	return bpf_map_lookup_elem(&fl_stamps, &index);
}

/* Why a stamp is abandoned. */
#define LOST 0
#define EVICTED 1
#define VOID 2 /* the packet was under way when the programs were attached */

__noinline int fl_abandon(__u32 index, int why)
{
	struct stamp *s = stamp_at(index);
	struct tally *t;

	if (!s || s->direction != EGRESS)
		return 0; /* received packets are counted where they arrive */
	t = tally_of(s->slot, EGRESS, s->protocol & 3);
	if (t)
		increment(why == EVICTED ? &t->evicted : why == VOID ? &t->unsampled : &t->unmatched);
	return 0;
}

/* Returns when a stamp began. */
static __always_inline __u64 beginning(const struct stamp *s)
{
	return s->at[0] ? s->at[0] : s->at[1];
}

/* Returns why a stamp is stale, or -1. */
static __always_inline int stale(const struct stamp *s, __u64 now)
{
	if (beginning(s) < fl_attached_at)
		return VOID;
	return between(beginning(s), now) >> HIST_TOP_BITS ? LOST : -1;
}

static __always_inline __u32 row_of(__u64 key)
{
	return (key * 0x9e3779b97f4a7c15ULL >> (64 - ROW_BITS)) & (fl_rows - 1);
}

static __always_inline struct keys *row_at(__u32 row)
{
	return &fl_keys[row & ((1 << ROW_BITS) - 1)];
}

/* Reports whether a packet has a stamp. Nearly all have none. */
static __always_inline int has_stamp(const struct keys *r, __u64 key)
{
#pragma unroll
	for (int i = 0; i < ROW; i++)
		if (((volatile const struct keys *)r)->skb[i] == key)
			return 1;
	return 0;
}

/*
 * Takes the stamp of a packet. Returns its place in the row, or ROW if there is none. put()
 * gives it back. Global, like fl_bucket; so are the others.
 */
__noinline int fl_take(__u32 row, __u64 key)
{
	struct keys *r = row_at(row);

	for (int i = 0; i < ROW; i++)
		if (r->skb[i] == key && __sync_bool_compare_and_swap(&r->skb[i], key, BUSY))
			return i;
	return ROW;
}

/* Bounds an index of a row. The verifier of 6.1 needs that at each use. */
static __always_inline __u32 in_row(__u32 place)
{
	asm volatile("" : "+r"(place)); /* or clang removes it */
	return place & (ROW - 1);
}

/* Takes a place for a new stamp: a free one, otherwise that of the oldest. */
__noinline int fl_take_free(__u32 row, __u64 now)
{
	struct keys *r = row_at(row);
	__u64 oldest = 0, age, key;
	struct stamp *s;
	__u32 place = ROW;
	int why;

	for (int i = 0; i < ROW; i++)
		if (!r->skb[i] && __sync_bool_compare_and_swap(&r->skb[i], 0, BUSY))
			return i;
	for (__u32 i = 0; i < ROW; i++) {
		s = stamp_at(row * ROW + i);
		if (!s)
			return ROW;
		age = between(beginning(s), now);
		if (age >= oldest) {
			place = i;
			oldest = age;
		}
	}
	if (place >= ROW)
		return ROW;
	place = in_row(place);
	key = r->skb[place];
	if (key == BUSY || !__sync_bool_compare_and_swap(&r->skb[place], key, BUSY))
		return ROW; /* another CPU has it */
	s = stamp_at(row * ROW + place);
	if (key && s) {
		why = stale(s, now);
		fl_abandon(row * ROW + place, why < 0 ? EVICTED : why);
	}
	return place;
}

static __always_inline void put(struct keys *r, int place, __u64 key)
{
	if (place >= 0 && place < ROW)
		*(volatile __u64 *)&r->skb[in_row(place)] = key;
}

/* Moves a stamp to another key. It does not give the old place back. */
static __always_inline void move(struct stamp *s, __u64 key, __u64 now)
{
	__u32 row = row_of(key);
	int place = fl_take_free(row, now);
	struct stamp *to = stamp_at(row * ROW + place);
	struct tally *t;

	if (place >= 0 && place < ROW && to) {
		*to = *s;
		put(row_at(row), place, key);
		fl_split_at = bpf_jiffies64();
		return;
	}
	t = tally_of(s->slot, EGRESS, s->protocol & 3);
	if (t)
		increment(&t->evicted);
}
