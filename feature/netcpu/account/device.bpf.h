/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Accounts: of a cgroup, of a tenant's packets, and of a device, with a cache on each CPU. */

static __always_inline __u32 of_cgroup(__u64 id)
{
	__u32 *slot = bpf_map_lookup_elem(&fl_containers, &id);

	return slot ? *slot : 0;
}

static __always_inline __u32 of_tenant(__u32 tenant)
{
	__u32 *slot = bpf_map_lookup_elem(&fl_payers, &tenant);

	return slot ? *slot : 0;
}

/*
 * Returns the owner of a namespace that user space does not know: the last sender there.
 */
static __always_inline __u32 nested(__u32 netns)
{
	struct fl_nested *n = bpf_map_lookup_elem(&fl_nested, &netns);

	if (n && !n->tenant)
		return 0; /* the host's */
	return NESTED | (n ? of_cgroup(n->tenant) : 0);
}

__noinline __u32 device_of(struct cpu *c, __u32 netns, __u32 ifindex)
{
	struct fl_owner *o;
	struct seen *s;
	__u32 value;

	if (!c)
		return 0;
	o = fl_of_device(netns, ifindex);
	if (!o)
		return nested(netns); /* not cached: no epoch invalidates it */
	value = of_tenant(o->tenant) | o->flags << 16;
	s = &c->seen[(netns ^ ifindex) & (SEEN - 1)];
	s->netns = netns;
	s->ifindex = ifindex;
	s->value = value;
	s->epoch = c->epoch;
	return value;
}

static __always_inline __u32 device_at(struct cpu *c, __u32 netns, __u32 ifindex)
{
	struct seen *s = &c->seen[(netns ^ ifindex) & (SEEN - 1)];

	if (s->netns == netns && s->ifindex == ifindex && s->epoch == c->epoch)
		return s->value;
	return device_of(c, netns, ifindex);
}

static __always_inline __u32 device(struct cpu *c, struct net_device *dev)
{
	return device_at(c, fl_netns_of(dev), dev->ifindex);
}
