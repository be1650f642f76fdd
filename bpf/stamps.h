/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A table of start times: a stamp, stored by key, stays until it is taken. It is a hash
 * of our own because the kernel's costs 0.1 us more per event. Keys that share a row are
 * found by a scan of the row. There is no lock: if two CPUs take the same stamp at once,
 * one of them gets no measurement; if two write to the same place, one stamp is lost.
 *
 * A map of stamps is a BPF_MAP_TYPE_ARRAY of 1 << STAMP_ROW_BITS struct stamps. The
 * including file defines STAMP_ROW_BITS and, as for hist.h, HIST_TOP_BITS. A stamp older
 * than 2^HIST_TOP_BITS ns counts as one with an end that no program saw, and its place is
 * reused.
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
 * Returns the address of an object as a number, for use as a key. The verifier allows no
 * arithmetic on a pointer, and no longer treats the result as one.
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

/* Signed: CPUs read the clock one after another, not always in the order of events. */
static __always_inline int dead(__u64 since, __u64 now)
{
	return (__s64)(now - since) >= 1LL << HIST_TOP_BITS;
}

/*
 * Stores now as the start time, and replaces an earlier one. Returns 0 if the row is
 * full.
 */
static __always_inline int put_stamp(void *map, __u64 key, __u64 now)
{
	struct stamps *r = stamps_of(map, key);
	__u32 free = STAMP_ROW;

	if (!r)
		return 0; /* for the verifier */
	for (int i = 0; i < STAMP_ROW; i++) {
		__u64 other = r->key[i];

		if (other == key)
			r->key[i] = other = 0; /* no program saw its end */
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
 * Removes a stamp and returns its time. Returns 0 if there is none, or if it is so old
 * that it was of an earlier object with this key.
 */
static __always_inline __u64 take_stamp(void *map, __u64 key, __u64 now)
{
	return stamp(map, key, now, 1);
}

/* Like take_stamp, but keeps the stamp. */
static __always_inline __u64 look_stamp(void *map, __u64 key, __u64 now)
{
	return stamp(map, key, now, 0);
}

#endif
