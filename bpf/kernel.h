/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The kernel types and fields that fairlead's BPF programs read, and nothing else: the
 * complete list of kernel internals that we rely on. CO-RE relocates the layouts at load,
 * so only names and types matter here.
 */
#ifndef FL_KERNEL_H
#define FL_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>

/* enum tcx_action_base, since 6.6. The headers that we build with are older. */
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

struct rtnl_link_ops {
	const char *kind;
} __kernel_type;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
	const struct rtnl_link_ops *rtnl_link_ops;
} __kernel_type;

struct napi_struct {
	struct net_device *dev;
} __kernel_type;

struct kernfs_node {
	__u64 id;
} __kernel_type;

struct cgroup {
	struct kernfs_node *kn;
} __kernel_type;

struct css_set {
	struct cgroup *dfl_cgrp;
} __kernel_type;

struct cfs_rq {
	int throttle_count;
} __kernel_type;

struct sched_entity {
	struct cfs_rq *cfs_rq;
} __kernel_type;

struct task_struct {
	unsigned int flags;
	int pid;
	unsigned long nvcsw;
	unsigned long nivcsw;
	struct sched_entity se;
	struct css_set *cgroups;
	char comm[16];
} __kernel_type;

/* include/linux/sched.h */
#define PF_KTHREAD 0x00200000

struct sock_common {
	volatile unsigned char skc_state;
	possible_net_t skc_net;
} __kernel_type;

struct sock_cgroup_data {
	struct cgroup *cgroup;
} __kernel_type;

struct sock {
	struct sock_common __sk_common;
	struct sock_cgroup_data sk_cgrp_data;
} __kernel_type;

struct sk_buff {
	struct sk_buff *next;
	struct net_device *dev;
	struct sock *sk;
	unsigned int len;
	__u32 priority;
	__u16 protocol;
	__u16 tc_index;
	__u16 network_header;
	unsigned int end;
	unsigned char *head;
	unsigned char *data;
} __kernel_type;

struct netdev_queue {
	struct net_device *dev;
} __kernel_type;

struct Qdisc {
	__u32 handle;
} __kernel_type;

struct skb_shared_info {
	unsigned short gso_segs;
} __kernel_type;

/* include/linux/interrupt.h */
#define TIMER_SOFTIRQ 1
#define NET_TX_SOFTIRQ 2
#define NET_RX_SOFTIRQ 3
#define TASKLET_SOFTIRQ 6
#define HRTIMER_SOFTIRQ 8

#endif
