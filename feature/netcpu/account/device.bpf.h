/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The owner of a device: from identity.h, with a cache on each CPU. */

static __always_inline __u32 of_cgroup(__u64 id)
{
	return fl_of_cgroup(id).account;
}

__noinline __u32 device_of(struct cpu *c, __u32 netns, __u32 ifindex)
{
	struct fl_owner o;
	struct seen *s;
	__u32 value;

	if (!c)
		return 0;
	o = fl_of_device(netns, ifindex);
	value = o.account | o.flags << 16;
	if (!value || value & NESTED)
		return value; /* not cached: no epoch invalidates it */
	s = &c->seen[(netns ^ ifindex) & (SEEN - 1)];
	s->netns = netns;
	s->ifindex = ifindex;
	s->value = value;
	s->known = 1;
	return value;
}

static __always_inline __u32 device_at(struct cpu *c, __u32 netns, __u32 ifindex)
{
	struct seen *s = &c->seen[(netns ^ ifindex) & (SEEN - 1)];

	if (s->known && s->netns == netns && s->ifindex == ifindex)
		return s->value;
	return device_of(c, netns, ifindex);
}

static __always_inline __u32 device(struct cpu *c, struct net_device *dev)
{
	return device_at(c, fl_netns_of(dev), dev->ifindex);
}
