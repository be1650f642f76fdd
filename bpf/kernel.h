/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The parts of the kernel that fairlead's BPF programs look at, and nothing
 * else: this is the list of kernel internals that we rely on. Layouts are
 * relocated at load (CO-RE), so only names and types count here.
 */
#ifndef FL_KERNEL_H
#define FL_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>

/* Since 6.6; the headers that we build with are older. enum tcx_action_base. */
#define TCX_NEXT -1
#define TCX_DROP 2

#define __kernel_type __attribute__((preserve_access_index))

struct ns_common {
	unsigned int inum;
} __kernel_type;

struct net {
	struct ns_common ns;
} __kernel_type;

typedef struct {
	struct net *net;
} __kernel_type possible_net_t;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
} __kernel_type;

struct napi_struct {
	struct net_device *dev;
} __kernel_type;

#endif
