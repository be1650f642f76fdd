/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The stamps of packets under way: who may have one, and where it is. */

/* A packet is passed over for so many others at the most: what follows a flood is seen soon. */
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

static __always_inline void one(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

/*
 * Tells user space of a packet. The reader comes by itself: to wake it is an interrupt
 * between the packet's stamp and the driver, and would be told as the network's time.
 */
__noinline int fl_tell(const struct record *r)
{
	if (r && bpf_ringbuf_output(&fl_records, (void *)r, sizeof(*r), BPF_RB_NO_WAKEUP))
		one(&fl_lost);
	return 0;
}

/*
 * Whether one more packet of a tenant, direction and protocol may be told in this window of
 * time: a flood of one takes neither the room of others nor the agent's time.
 */
#define MOST_TOLD 335 /* 20,000 in a second */
static __always_inline int may_tell(struct tally *t, __u64 now)
{
	__u32 window = now >> WINDOW_BITS;

	if (t->window != window) {
		t->window = window;
		t->told = 0;
	}
	if (__sync_fetch_and_add(&t->told, 1) < MOST_TOLD)
		return 1;
	one(&fl_lost);
	return 0;
}

/* Two CPUs read their clocks one after the other: what is negative is nothing. */
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
	one(&t->stage[stage].count[bucket]);
}

/* Counts what an event cost this CPU, with one reading of the clock in it. */
__noinline int fl_cost(__u32 hook, __u64 began)
{
	struct histogram *h = bpf_map_lookup_elem(&fl_costs, &hook);
	struct cpu *c = this_cpu();
	__u64 ns = bpf_ktime_get_ns() - began;
	__u32 bucket = fl_bucket(ns);

	if (!c || !h || !c->worked || bucket >= HIST_BUCKETS)
		return 0; /* it had no stamp */
	c->worked = 0;
	__sync_fetch_and_add(&h->sum, ns);
	one(&h->count[bucket]);
	return 0;
}

/*
 * Whether one more packet may begin on this CPU. In a window of time that follows one
 * with more than fl_budget, one of so many is taken as that allows, by chance; the
 * first busy window is cut off at four times as many. Whoever is passed over costs a
 * few instructions, as in a flood nearly all are.
 */
static __always_inline int admit(struct cpu *c)
{
	__u64 jiffy = bpf_jiffies64(), offered;

	if (c->jiffy != jiffy) {
		c->jiffy = jiffy;
		c->now = bpf_ktime_get_ns();
		if (c->passed != c->before)
			fl_passed_at = c->now; /* not each time: it is every CPU's */
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

/* The stamp at an index of fl_stamps. */
static __always_inline struct stamp *stamp_at(__u32 index)
{
	return bpf_map_lookup_elem(&fl_stamps, &index);
}

/* Why the packet of a stamp will never come to its end. */
#define LOST 0
#define EVICTED 1
#define VOID 2 /* it was under way when the programs were attached */

__noinline int fl_abandon(__u32 index, int why)
{
	struct stamp *s = stamp_at(index);
	struct tally *t;

	if (!s || s->direction != EGRESS)
		return 0; /* one that is received is counted where it arrives */
	t = tally_of(s->slot, EGRESS, s->protocol & 3);
	if (t)
		one(why == EVICTED ? &t->evicted : why == VOID ? &t->unsampled : &t->unmatched);
	return 0;
}

/* When a stamp began. */
static __always_inline __u64 beginning(const struct stamp *s)
{
	return s->at[0] ? s->at[0] : s->at[1];
}

/* Why a stamp is not believed any more; -1: it is. */
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

/* Whether a packet has a stamp: for nearly all the answer is no, and they go on. */
static __always_inline int has_stamp(const struct keys *r, __u64 key)
{
#pragma unroll
	for (int i = 0; i < ROW; i++)
		if (((volatile const struct keys *)r)->skb[i] == key)
			return 1;
	return 0;
}

/*
 * Where the stamp of a packet is, and takes it: its place in the row, or ROW if
 * there is none. put() gives it back. Global, as fl_bucket is; so are the others.
 */
__noinline int fl_take(__u32 row, __u64 key)
{
	struct keys *r = row_at(row);

	for (int i = 0; i < ROW; i++)
		if (r->skb[i] == key && __sync_bool_compare_and_swap(&r->skb[i], key, BUSY))
			return i;
	return ROW;
}

/* An index of a row, as the verifier of 6.1 has to see it at each use. */
static __always_inline __u32 in_row(__u32 place)
{
	asm volatile("" : "+r"(place)); /* clang knows already, and would leave it out */
	return place & (ROW - 1);
}

/* Takes a place for a new stamp: a free one, else that of the oldest. */
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

/* Has a stamp found by another key. The old place is not given back. */
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
		one(&t->evicted);
}
