/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Whose a device, a socket or a task is. Package identity makes these maps and writes
 * them; an object that includes this is opened with Identity.Maps. They name the tenant.
 * What a feature has to say of a tenant is in an array of that feature by the tenant's
 * slot; what it has to say of one container of several that share a network, in a map of
 * its own by cgroup (identity.Cgroups).
 *
 * What a container, an image or a packet says of itself is in none of them. A full
 * fl_devices or fl_cgroups is an error of user space; what is not in it is nobody's.
 */
#ifndef FL_IDENTITY_H
#define FL_IDENTITY_H

#include "kernel.h"

#include <bpf/bpf_helpers.h>

#define FL_MAX_DEVICES 32768
#define FL_MAX_CGROUPS 65536
#define FL_MAX_TENANTS 65536 /* for arrays by a tenant's slot */

struct fl_owner {
	__u16 tenant; /* the slot of the network tenant; 0: nobody */
	__u16 flags;
};
_Static_assert(sizeof(struct fl_owner) == 4, "read by Go");

#define FL_HOST_END 1	/* of a device: the host's end of that tenant's veth */
#define FL_HOST_SIDE 2	/* in a namespace in which host ends are, and no container's */

/* A device by its namespace's inode and its index; index 0: any other there. */
struct fl_device {
	__u32 netns;
	__u32 ifindex;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FL_MAX_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct fl_device);
	__type(value, struct fl_owner);
} fl_devices SEC(".maps");

/* The slot of the tenant by cgroup v2 id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FL_MAX_CGROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} fl_cgroups SEC(".maps");

/*
 * Goes up with each change of fl_devices, fl_cgroups, or what a feature says of whom they
 * name (Identity.Changed): what was kept of them is old then. A section of its own, as it
 * is one for all objects.
 */
__u32 fl_epoch SEC(".data.identity");

/* The slot of the tenant that a cgroup is in; 0: nobody's. */
static __always_inline __u32 fl_of_cgroup(__u64 id)
{
	__u32 *tenant = bpf_map_lookup_elem(&fl_cgroups, &id);

	return tenant ? *tenant : 0;
}

/*
 * Whose a device is; where it is not known by its index, whose its namespace is. 0: user
 * space does not know the namespace.
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

/* enum of include/net/tcp_states.h: what is no full socket, and has no cgroup in it. */
#define FL_TCP_TIME_WAIT 6
#define FL_TCP_NEW_SYN_RECV 12

static __always_inline int fl_full_sock(struct sock *sk)
{
	return sk && sk->__sk_common.skc_state != FL_TCP_TIME_WAIT &&
	       sk->__sk_common.skc_state != FL_TCP_NEW_SYN_RECV;
}

/* Both of a full socket only. */
static __always_inline __u32 fl_netns_of_sock(struct sock *sk)
{
	return sk->__sk_common.skc_net.net->ns.inum;
}

static __always_inline __u64 fl_cgroup_of_sock(struct sock *sk)
{
	return sk->sk_cgrp_data.cgroup->kn->id;
}

#endif
