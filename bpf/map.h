/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* How maps with keys and values are declared. */
#ifndef FL_MAP_H
#define FL_MAP_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#define MAP(name, kind, most, k, v) MAP_WITH(name, kind, most, 0, k, v)

/* A hash that takes memory only for the entries that it has. */
#define SPARSE(name, most, k, v) MAP_WITH(name, HASH, most, BPF_F_NO_PREALLOC, k, v)

#define MAP_WITH(name, kind, most, flags, k, v)    \
	struct {                                   \
		__uint(type, BPF_MAP_TYPE_##kind); \
		__uint(max_entries, most);         \
		__uint(map_flags, flags);          \
		__type(key, k);                    \
		__type(value, v);                  \
	} name SEC(".maps")

#endif
