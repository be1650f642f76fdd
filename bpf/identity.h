/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Maps devices, sockets and tasks to tenants. Package identity creates and writes these
 * maps; an object that includes this header is opened with Identity.Maps. A feature keeps
 * its own attributes of a tenant in an array indexed by the tenant's slot. Attributes of
 * one container among several that share a network are in a map of the feature by cgroup
 * (identity.Cgroups).
 *
 * Nothing that a container, an image or a packet claims about itself is in these maps. A
 * full fl_devices or fl_cgroups is an error in user space; what has no entry belongs to
 * no tenant.
 */
#ifndef FL_IDENTITY_H
#define FL_IDENTITY_H

#include "kernel.h"
#include "map.h"

#include <bpf/bpf_helpers.h>

#define FL_MAX_DEVICES 32768
#define FL_MAX_CGROUPS 65536
#define FL_MAX_TENANTS 65536 /* for arrays by a tenant's slot */

struct fl_owner {
	__u16 tenant; /* slot of the network tenant; 0: none */
	__u16 flags;
};
_Static_assert(sizeof(struct fl_owner) == 4, "read by Go");

#define FL_HOST_END 1	/* of a device: the host end of the tenant's veth */
#define FL_HOST_SIDE 2	/* in a namespace with host ends, which no container owns */

/*
 * A device, by the inode of its namespace and its ifindex. ifindex 0: any other device
 * there.
 */
struct fl_device {
	__u32 netns;
	__u32 ifindex;
};

SPARSE(fl_devices, FL_MAX_DEVICES, struct fl_device, struct fl_owner);

/* cgroup v2 id -> slot of the tenant. */
SPARSE(fl_cgroups, FL_MAX_CGROUPS, __u64, __u32);

/*
 * Incremented on each change of fl_devices, of fl_cgroups, or of a feature's attributes
 * of their tenants (Identity.Changed). It invalidates what programs cache of them. It has
 * a section of its own because all objects share it.
 */
__u32 fl_epoch SEC(".data.identity");

/* Returns the slot of a cgroup's tenant, or 0. */
static __always_inline __u32 fl_of_cgroup(__u64 id)
{
	__u32 *tenant = bpf_map_lookup_elem(&fl_cgroups, &id);

	return tenant ? *tenant : 0;
}

/*
 * Returns the owner of a device or, if the device has no entry, the owner of its
 * namespace. Returns NULL if user space does not know the namespace.
 */
static __always_inline struct fl_owner *fl_of_device(__u32 netns, __u32 ifindex)
{
	struct fl_device key = {.netns = netns, .ifindex = ifindex};
	struct fl_owner *o = bpf_map_lookup_elem(&fl_devices, &key);

	if (o || !ifindex)
		return o;
	key.ifindex = 0;
	return bpf_map_lookup_elem(&fl_devices, &key);
}

static __always_inline __u32 fl_netns_of(struct net_device *dev)
{
	return dev->nd_net.net->ns.inum;
}

static __always_inline __u64 fl_cgroup_of_task(struct task_struct *t)
{
	return t->cgroups->dfl_cgrp->kn->id;
}

/*
 * enum of include/net/tcp_states.h: sockets in these states are not full sockets and have
 * no cgroup.
 */
#define FL_TCP_TIME_WAIT 6
#define FL_TCP_NEW_SYN_RECV 12

static __always_inline int fl_full_sock(struct sock *sk)
{
	return sk && sk->__sk_common.skc_state != FL_TCP_TIME_WAIT &&
	       sk->__sk_common.skc_state != FL_TCP_NEW_SYN_RECV;
}

/* For full sockets only, like the next function. */
static __always_inline __u32 fl_netns_of_sock(struct sock *sk)
{
	return sk->__sk_common.skc_net.net->ns.inum;
}

static __always_inline __u64 fl_cgroup_of_sock(struct sock *sk)
{
	return sk->sk_cgrp_data.cgroup->kn->id;
}

#endif
