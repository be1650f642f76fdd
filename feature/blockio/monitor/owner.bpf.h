/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Finds the container of a cgroup. Part of monitor.bpf.c.
 */
#ifndef FL_MONITOR_OWNER_BPF_H
#define FL_MONITOR_OWNER_BPF_H

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
} __kernel_type;

/* Flavours of what kernel.h has: other objects do not need these fields. */
struct cgroup___tree {
	struct cgroup_subsys_state self;
	int level;
	struct kernfs_node *kn;
} __kernel_type;

/* The cgroups above a cgroup, the root first. */
struct cgroup___ancestors {
	struct cgroup *ancestors[0];
} __kernel_type;

#define MAX_GROUPS 8192
#define BELOW 8
#define ABOVE 16

/* Ids in place of a container's. Also decide/window.go. */
#define SYSTEM 0ULL /* everything outside of containers */
#define IDLE (~0ULL) /* no task ran */
#define UNSEEN (~1ULL) /* so long ago that fl_runs has forgotten */

/* Cgroup v2 id -> container. Written by user space. */
SPARSE(fl_groups, MAX_GROUPS, __u64, __u64);

/*
 * In the hierarchy with the io or blkio controller, which has its own ids, the cgroup of a container
 * there -> itself, which names its accounts.
 */
SPARSE(fl_iogroups, MAX_GROUPS, __u64, __u64);

/* The id of the cgroup that is above g at a level, at which there is one. */
static __always_inline __u64 ancestor(struct cgroup___tree *g, int level)
{
	__u64 up = 0, at = address(g) + 8 * level;

	bpf_probe_read_kernel(&up, sizeof(up), (void *)(at + bpf_core_field_offset(struct cgroup___ancestors, ancestors)));
	return BPF_CORE_READ((struct cgroup___tree *)up, kn, id);
}

static __always_inline __u64 owner(void *groups, struct cgroup___tree *g)
{
	struct cgroup___tree *at = g;
	__u64 id, *container;

	for (int i = 0; i < BELOW; i++) {
		struct cgroup_subsys_state *up;

		id = at->kn->id;
		container = bpf_map_lookup_elem(groups, &id);
		if (container)
			return *container;
		up = at->self.parent;
		if (!up)
			return SYSTEM; /* that was the root */
		at = (struct cgroup___tree *)up->cgroup;
	}
	for (int level = ABOVE; level > 0; level--) {
		if (level > g->level - BELOW)
			continue; /* it has been looked at */
		id = ancestor(g, level);
		container = bpf_map_lookup_elem(groups, &id);
		if (container)
			return *container;
	}
	if (g->level > BELOW + ABOVE)
		__sync_fetch_and_add(&fl_lost.levels, 1);
	return SYSTEM;
}

static __always_inline __u64 owner_of(struct task_struct *t)
{
	if (!t->pid)
		return IDLE;
	return owner(&fl_groups, (struct cgroup___tree *)t->cgroups->dfl_cgrp);
}

#endif
