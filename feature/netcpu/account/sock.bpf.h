/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Sockets identify the owner of an open packet where no veth does: with the host's
 * network and with macvlan. Each such tenant has a copy of the program on its cgroup,
 * so that only its own packets pay for it.
 */

SEC("cgroup_skb/ingress")
int fl_reached(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();

	if (!c || !c->run)
		return 1; /* a task's own work; pass */
	if (c->cur == OPEN && told(c))
		c->by_socket = 1; /* the open packet was another's: this is one of the list before it */
	if (c->cur != OPEN && !c->by_socket)
		return 1; /* a device identified it; pass */
	if (c->cur != OPEN && c->owner == fl_slot && !c->in_ring)
		return 1; /* the next packet of a list with the same owner; pass */
	if (c->cur != OPEN)
		close(c, bpf_ktime_get_ns());
	settle(c, fl_slot, RECEIVE | c->proto, 0, 1);
	c->by_socket = 1;
	return 1; /* pass */
}
