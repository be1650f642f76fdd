/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Sockets tell whose an open packet was where no veth does: host network and
 * macvlan. A copy sits on the cgroup of each such tenant, so that nobody else's
 * packets pay for it.
 */

SEC("cgroup_skb/ingress")
int fl_reached(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c || !c->run || (c->cur != OPEN && !c->by_socket))
		return 1; /* a task's own work, or told by a device; pass */
	if (c->cur != OPEN && c->owner == fl_slot && !c->in_ring)
		return 1; /* the same one's next packet of a list; pass */
	if (c->cur != OPEN)
		close(c, bpf_ktime_get_ns());
	settle(c, fl_slot, RECEIVE | c->proto, 0, 1);
	c->by_socket = 1;
	return 1; /* pass */
}
