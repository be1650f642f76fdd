//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps of bpf/identity.h and bpf/fate.h, with which other objects are opened. There
 * is no program here: nothing is attached, and no event has a cost.
 */

#include "fate.h"
#include "identity.h"

char _license[] SEC("license") = "Dual BSD/GPL";
