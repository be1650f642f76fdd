/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Whose a device, a socket or a task is. Package identity makes these maps and
 * writes fl_devices and fl_cgroups; an object that includes this is opened with
 * Identity.Maps. One look-up tells all that any feature knows of an owner.
 *
 * What a container, an image or a packet says of itself is in none of them, but for
 * fl_nested: see there. A full fl_devices or fl_cgroups is an error of user space;
 * what is not in it is nobody's. A full fl_nested forgets the least used.
 */
#ifndef FL_IDENTITY_H
#define FL_IDENTITY_H

#include "kernel.h"

#include <bpf/bpf_helpers.h>

#define FL_MAX_DEVICES 32768
#define FL_MAX_CGROUPS 65536
#define FL_MAX_NESTED 4096

/* 0 is nobody in each field. */
struct fl_owner {
	__u16 tenant;  /* the slot of the network tenant, */
	__u16 account; /* and of the container in netcpu's accounts */
	__u16 class;   /* the minor of the class that traffic gives its sockets' packets */
	__u16 flags;
};
_Static_assert(sizeof(struct fl_owner) == 8, "read by Go");

#define FL_HOST_END 1	/* of a device: the host's end of that tenant's veth */
#define FL_HOST_SIDE 2	/* in a namespace in which host ends are, and no container's */
#define FL_COUNTED 4	/* netcpu's early drop counts what its polls take */
/* Said by no map: in a namespace that a tenant may have made, that of the rest if any. */
#define FL_NESTED 8

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

/* By cgroup v2 id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FL_MAX_CGROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct fl_owner);
} fl_cgroups SEC(".maps");

/* Who sent last in a namespace that user space does not know. */
struct fl_nested {
	__u64 cgroup;
	__u64 tenant; /* the cgroup of the tenant that this is in; 0: no tenant's */
	__u32 epoch;  /* fl_epoch when that was found */
	__u32 pad;
};

/*
 * Such a namespace anybody can make who may make a user namespace. By its inode.
 * netcpu's accounts write it, by the cgroup of the task that sends.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, FL_MAX_NESTED);
	__type(key, __u32);
	__type(value, struct fl_nested);
} fl_nested SEC(".maps");

/*
 * Goes up with each change of fl_devices or fl_cgroups: what was kept of them is old
 * then. A section of its own, as it is one for all objects.
 */
__u32 fl_epoch SEC(".data.identity");

static __always_inline struct fl_owner fl_of_cgroup(__u64 id)
{
	struct fl_owner nobody = {}, *o = bpf_map_lookup_elem(&fl_cgroups, &id);

	return o ? *o : nobody;
}

/* Whose a device is; where it is not known by its index, whose its namespace is. */
static __always_inline struct fl_owner fl_of_device(__u32 netns, __u32 ifindex)
{
	struct fl_device key = {.netns = netns, .ifindex = ifindex};
	struct fl_owner nested = {}, *o = bpf_map_lookup_elem(&fl_devices, &key);
	struct fl_nested *n;

	if (!o && ifindex) {
		key.ifindex = 0;
		o = bpf_map_lookup_elem(&fl_devices, &key);
	}
	if (o)
		return *o;
	n = bpf_map_lookup_elem(&fl_nested, &netns);
	if (n && !n->tenant)
		return nested; /* the host's */
	if (n)
		nested = fl_of_cgroup(n->tenant);
	nested.flags |= FL_NESTED;
	return nested;
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
