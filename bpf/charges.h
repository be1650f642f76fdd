/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps of the accounts that other objects also use. Package account creates them and
 * passes them to bpf.Open for the others.
 */
#ifndef FL_CHARGES_H
#define FL_CHARGES_H

#include "kernel.h"
#include "map.h"

#include <bpf/bpf_helpers.h>

/* The maximum number of slots in use at a time. Slot 0 is the system's. */
#define MAX_SLOTS 1024

/*
 * Slot of a tenant -> ns that its packets took from others, minus what others' packets
 * took from its tasks. The scheduler has charged the tenant that much too little. Written
 * in softirq.
 */
MAP(fl_charges, ARRAY, MAX_SLOTS, __u32, __s64);

#endif
