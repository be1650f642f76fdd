/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * When something began, by a key, until it is taken. A hash of our own, as one of the
 * kernel's takes 0.1 us more for each event; who shares a row is found by a look at all
 * of it. Nothing locks it: of two who take the same stamp at once, one is not measured,
 * and of two who are given the same place, one has none.
 *
 * A map of stamps is a BPF_MAP_TYPE_ARRAY of 1 << STAMP_ROW_BITS struct stamps. Who
 * includes this says how many that are, and, as for hist.h, how long something lasts at
 * most: what is older than 2^HIST_TOP_BITS ns ended unseen, and makes room.
 */
#ifndef FL_STAMPS_H
#define FL_STAMPS_H

#include "kernel.h"

#include <bpf/bpf_helpers.h>

#define STAMP_ROW 8

struct stamps {
	__u64 key[STAMP_ROW]; /* 0: free */
	__u64 since[STAMP_ROW]; /* ns */
};

/*
 * The address of an object as a number, and so as a key. The verifier lets nobody
 * calculate with a pointer, and does not know it any more after this.
 */
static __always_inline __u64 address(const void *object)
{
	__u64 n = 0;

	bpf_probe_read_kernel(&n, sizeof(n), &object);
	return n;
}

static __always_inline struct stamps *stamps_of(void *map, __u64 key)
{
	__u32 index = key * 0x9e3779b97f4a7c15ULL >> (64 - STAMP_ROW_BITS);

	return bpf_map_lookup_elem(map, &index);
}

/* Signed: CPUs read the clock one after the other, and not always in the order of events. */
static __always_inline int dead(__u64 since, __u64 now)
{
	return (__s64)(now - since) >= 1LL << HIST_TOP_BITS;
}

/* Notes that it begins now, whatever was noted before. Reports whether there is room. */
static __always_inline int put_stamp(void *map, __u64 key, __u64 now)
{
	struct stamps *r = stamps_of(map, key);
	__u32 free = STAMP_ROW;

	if (!r)
		return 0; /* for the verifier */
	for (int i = 0; i < STAMP_ROW; i++) {
		__u64 other = r->key[i];

		if (other == key)
			r->key[i] = other = 0; /* of one that ended unseen */
		if (free == STAMP_ROW && (!other || dead(r->since[i], now)))
			free = i;
	}
	if (free >= STAMP_ROW)
		return 0;
	r->since[free] = now;
	r->key[free] = key;
	return 1;
}

static __always_inline __u64 stamp(void *map, __u64 key, __u64 now, int take)
{
	struct stamps *r = stamps_of(map, key);
	__u64 since;

	if (!r)
		return 0; /* for the verifier */
	for (int i = 0; i < STAMP_ROW; i++) {
		if (r->key[i] != key)
			continue;
		since = r->since[i];
		if (take)
			r->key[i] = 0;
		return dead(since, now) || since > now ? 0 : since;
	}
	return 0;
}

/*
 * When it began, 0 if that is not known, or so long ago that it was another of this key;
 * it is forgotten by this.
 */
static __always_inline __u64 take_stamp(void *map, __u64 key, __u64 now)
{
	return stamp(map, key, now, 1);
}

/* The same, and it stays. */
static __always_inline __u64 look_stamp(void *map, __u64 key, __u64 now)
{
	return stamp(map, key, now, 0);
}

#endif
