/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps of the accounts that other objects use too: package account makes them,
 * and bpf.Open is given them for the others.
 */
#ifndef FL_CHARGES_H
#define FL_CHARGES_H

#include "kernel.h"

#include <bpf/bpf_helpers.h>

/* Tenants at the same time, and slot 0 for the system. */
#define MAX_SLOTS 1024

/*
 * Slot of a tenant -> ns that its packets took from others, less what others'
 * packets took from its tasks: what the scheduler has charged it too little.
 * Written within the softirq.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS);
	__type(key, __u32);
	__type(value, __s64);
} fl_charges SEC(".maps");

#endif
