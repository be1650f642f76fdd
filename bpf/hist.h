/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The buckets of a log-linear histogram of durations, as package hist reads them. The
 * including file defines resolution and range: each power of two of nanoseconds has 1 <<
 * HIST_SUB_BITS buckets, and the last bucket also counts everything from 2^HIST_TOP_BITS
 * ns on.
 */
#ifndef FL_HIST_H
#define FL_HIST_H

#include "kernel.h"

#include <bpf/bpf_helpers.h>

#define HIST_BUCKETS ((HIST_TOP_BITS - HIST_SUB_BITS + 1) << HIST_SUB_BITS)

/*
 * Returns the bucket of a duration. A global function, which the verifier checks once
 * instead of at each call: inlined in a loop over packets it exceeds the limits of 6.1's
 * verifier.
 */
__noinline __u32 fl_bucket(__u64 ns)
{
	__u32 exp = 0;

	if (ns >= 1ULL << HIST_TOP_BITS)
		return HIST_BUCKETS - 1;
	for (__u32 step = 32; step; step /= 2)
		if (ns >> (exp + step) >= 1 << HIST_SUB_BITS)
			exp += step;
	return (exp << HIST_SUB_BITS) + (ns >> exp);
}

#endif
