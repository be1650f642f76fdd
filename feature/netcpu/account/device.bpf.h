/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whose a device is. */

/* Raised by user space after a change of fl_devices or fl_cgroups. */
__u32 fl_epoch;

static __always_inline __u32 of_cgroup(__u64 id)
{
	__u32 *slot = bpf_map_lookup_elem(&fl_cgroups, &id);

	return slot ? *slot : 0;
}

__noinline __u32 device_of(struct cpu *c, __u32 netns, __u32 ifindex)
{
	struct seen *s;
	struct device key = {.netns = netns, .ifindex = ifindex};
	__u32 *v;

	if (!c)
		return 0;
	s = &c->seen[(netns ^ ifindex) & (SEEN - 1)];
	v = bpf_map_lookup_elem(&fl_devices, &key);
	if (!v) {
		key.ifindex = 0;
		v = bpf_map_lookup_elem(&fl_devices, &key);
	}
	if (!v) {
		struct nested *n = bpf_map_lookup_elem(&fl_nested, &netns);

		/* Not kept: no epoch ends it. */
		if (!n)
			return NESTED;
		return n->tenant ? NESTED | of_cgroup(n->tenant) : 0;
	}
	s->netns = netns;
	s->ifindex = ifindex;
	s->value = *v;
	s->known = 1;
	return s->value;
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
	return device_at(c, dev->nd_net.net->ns.inum, dev->ifindex);
}
