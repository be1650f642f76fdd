//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Measures how long packets of containers take on this host, by stage (MACE). A packet
 * gets a stamp at the first hook and further times on its path; the last hook counts it in
 * histograms. The address of the skb identifies the stamp: it stays the same through veth,
 * bridge, routing and tunnel. At the last hook a check over fields that no device on the
 * path changes verifies that it is still the same packet.
 *
 * Hooks (tp_btf), each for every packet of the host:
 *   net_dev_queue            IP hands a packet to a device, before its qdisc
 *   net_dev_start_xmit       the driver receives it from the qdisc
 *   napi_gro_receive_entry   a driver hands a packet to GRO
 *   netif_rx                 a driver hands a packet to a backlog; attached only if an
 *                            uplink is a veth
 *   netif_receive_skb        the stack receives it, after GRO and RPS
 * and those of waits.bpf.h, while the host is watched. At the cgroups of the
 * containers:
 *   cgroup_skb/ingress       a socket receives it
 *
 * Cost of an event: two bytes of memory at a device of no interest. At others, one cache line
 * shows whether the packet has a stamp. Beyond fl_budget per second and CPU packets are
 * chosen at random, and one that is passed over also costs a counter. Only a packet that has
 * or gets a stamp costs look-ups and a clock.
 *
 * Readers of the maps: meter.go, records.go. Full maps: a full row of fl_keys evicts its
 * oldest stamp, and counts it. A full fl_records drops records, and fl_lost counts them.
 * Package identity fills fl_devices and fl_cgroups. These programs change neither packets
 * nor their path.
 */

#include "kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "identity.h"
#include "map.h"
#include "parse.h"

#include "maps.bpf.h"

#include "packet.bpf.h"

#include "stamp.bpf.h"

#include "waits.bpf.h"

#include "ends.bpf.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Numbers of the hooks in fl_near. */
#define POLL 0
#define RECEIVE 1
#define QUEUE 2
#define XMIT 3

/* Returns the role and the slot of a device; 0 if it is of no interest. */
static __always_inline __u32 device_of(struct net_device *dev, __u16 near)
{
	struct fl_device at = {.netns = fl_netns_of(dev), .ifindex = dev->ifindex};
	struct fl_owner *o;

	if (near & NEAR_UPLINK && at.netns == fl_host_netns)
		for (int i = 0; i < UPLINKS && fl_uplinks[i]; i++)
			if (fl_uplinks[i] == at.ifindex)
				return UPLINK;
	o = bpf_map_lookup_elem(&fl_devices, &at);
	if (!o || !(fl_tenants[o->tenant] & MEASURED))
		return 0;
	return o->tenant | (o->flags & FL_HOST_END ? HOST_END : CONTAINER);
}

/* Returns the slot of the packet's socket if its tenant is in the host's namespace, else 0. */
static __always_inline __u32 host_tenant(const struct sk_buff *skb)
{
	struct sock *sk = skb->sk;
	__u16 tenant;

	if (!fl_unseen || !fl_full_sock(sk))
		return 0;
	tenant = fl_of_cgroup(fl_cgroup_of_sock(sk));
	return (fl_tenants[tenant] & (MEASURED | HOST)) == (MEASURED | HOST) ? tenant : 0;
}

/* Reports whether the host itself sends: a forwarded packet may still have its sender's socket. */
static __always_inline int from_host(const struct sock *sk)
{
	return sk && sk->__sk_common.skc_net.net->ns.inum == fl_host_netns;
}

/* Returns the direction in which a packet without a stamp begins at this hook and device, or -1. */
static __always_inline int begins(const struct sk_buff *skb, int hook, __u32 role, __u32 *device)
{
	if (hook == QUEUE && role == CONTAINER)
		return EGRESS;
	if (hook == QUEUE && role == HOST_END)
		return from_host(skb->sk) ? FROM_HOST : -1;
	if (hook == QUEUE && role == UPLINK) {
		*device = host_tenant(skb);
		return *device ? EGRESS : -1;
	}
	if ((hook == POLL || hook == RECEIVE) && role == UPLINK)
		return INGRESS;
	return -1;
}

/* Handles an event of a packet at a device that may be of interest. */
static __always_inline int look(const struct sk_buff *skb, struct net_device *dev, __u16 near, const int hook)
{
	__u32 row, role, device, direction;
	struct stamp *s = 0;
	struct keys *r;
	struct flow f = {};
	struct cpu *c;
	int place = ROW, begin_as, why;
	__u64 key, now;

	c = this_cpu();
	if (!c)
		return 0; /* for the verifier */
	key = address(c, skb);
	row = row_of(key);
	r = row_at(row);
	if (has_stamp(r, key))
		place = fl_take(row, key);
	if (hook == XMIT && place == ROW && near & NEAR_UPLINK && bpf_jiffies64() - fl_split_at < SPLIT_JIFFIES &&
	    sent_flow(skb, &f)) {
		key = key_of(&f);
		row = row_of(key);
		r = row_at(row);
		place = fl_take(row, key);
	}
	if (place == ROW && (!(near & (1 << hook)) || !admit(c))) {
		if (hook == RECEIVE)
			c->since = 0; /* the next packet that a socket receives may be this one */
		return 0;
	}
	device = device_of(dev, near);
	if (!device) {
		put(r, place, key);
		return 0; /* it shares the index of a device of interest */
	}
	role = device & ROLE;
	now = bpf_ktime_get_ns();
	if (place < ROW && place >= 0) {
		s = stamp_at(row * ROW + place);
		if (!s)
			return 0; /* for the verifier */
		why = stale(s, now);
		if (why >= 0) {
			fl_abandon(row * ROW + place, why);
			s = 0;
			put(r, place, 0);
			place = ROW;
		}
	}
	if (hook == RECEIVE && role == CONTAINER) {
		arrived(c, s, row * ROW + place, skb, device, now);
		put(r, place, 0);
		return 0;
	}
	if (s && hook == RECEIVE && role == UPLINK && s->direction == INGRESS) {
		/* From GRO; or a second time, from an IFB. */
		if (!s->at[I_RECEIVED] || (received_flow(skb, &f) && s->check == check_of(&f))) {
			if (!s->at[I_RECEIVED]) {
				s->at[I_RECEIVED] = now;
				s->wait = keep_wait(INGRESS, FIRST, s->at[I_POLLED], now);
			}
			if (fl_unseen) {
				if (!f.family)
					received_flow(skb, &f);
				may_be_host(c, skb, s, &f, now);
			}
			put(r, place, key);
			return 0;
		}
	}
	begin_as = begins(skb, hook, role, &device);
	if (begin_as >= 0) {
		__builtin_memset(&f, 0, sizeof(f));
		if (hook == QUEUE ? !sent_flow(skb, &f) : !received_flow(skb, &f)) {
			if (s)
				fl_abandon(row * ROW + place, LOST);
			put(r, place, 0);
			return 0; /* no IP */
		}
		if (s)
			fl_abandon(row * ROW + place, LOST); /* of an earlier packet with the same skb */
		if (hook == QUEUE && role == UPLINK && splits(skb, dev)) {
			put(r, place, 0);
			key = key_of(&f);
			row = row_of(key);
			r = row_at(row);
			s = 0;
			fl_split_at = bpf_jiffies64();
		}
		if (!s)
			place = fl_take_free(row, now);
		direction = begin_as;
		if (direction == EGRESS) {
			struct tally *t = tally_of(device, EGRESS, class_of(&f));

			if (t)
				increment(&t->seen);
			if (t && place == ROW)
				increment(&t->evicted);
		} else if (place == ROW) {
			c->evicted++;
		}
		if (place < 0 || place >= ROW)
			return 0;
		s = stamp_at(row * ROW + place);
		if (!s)
			return 0; /* for the verifier */
		begin(s, direction, device, &f);
		if (hook == RECEIVE) {
			s->at[I_RECEIVED] = now;
			if (fl_unseen)
				may_be_host(c, skb, s, &f, now);
		} else {
			s->at[0] = now;
			s->host_mode = role == UPLINK && direction == EGRESS;
		}
		put(r, place, key);
		return 0;
	}
	if (!s)
		return 0;
	if (s->direction == EGRESS) {
		if (hook == XMIT && role == UPLINK) {
			sent(s, skb, now);
			put(r, place, 0);
			return 0;
		}
		if (hook == XMIT && role == CONTAINER && !s->at[E_SENT])
			s->at[E_SENT] = now;
		if (hook == RECEIVE && role == HOST_END && !s->at[E_ARRIVED]) {
			s->at[E_ARRIVED] = now;
			if (s->traced)
				s->wait = keep_wait(EGRESS, DELIVER, s->at[E_SENT], now);
		}
		if (hook == QUEUE && role == UPLINK) {
			s->at[E_QDISC] = now;
			if (splits(skb, dev) && sent_flow(skb, &f)) {
				move(s, key_of(&f), now);
				put(r, place, 0);
				return 0;
			}
		}
	} else if (s->direction == INGRESS && role == HOST_END) {
		if (hook == QUEUE)
			s->at[I_QDISC] = now;
		if (hook == XMIT)
			s->at[I_SENT] = now;
	}
	put(r, place, key);
	return 0;
}

/* Handles an event of a packet at a device. */
static __always_inline int event(const struct sk_buff *skb, struct net_device *dev, const int hook)
{
	__u16 near = fl_near[dev->ifindex & (NEAR - 1)];

	if (!(near & (0x11 << hook)))
		return 0; /* no device with this index is of interest at this hook */
	return look(skb, dev, near, hook);
}

SEC("tp_btf/net_dev_queue")
int BPF_PROG(fl_queue, struct sk_buff *skb)
{
	return event(skb, skb->dev, QUEUE);
}

SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(fl_xmit, struct sk_buff *skb, struct net_device *dev)
{
	return event(skb, dev, XMIT);
}

SEC("tp_btf/napi_gro_receive_entry")
int BPF_PROG(fl_poll, struct sk_buff *skb)
{
	return event(skb, skb->dev, POLL);
}

/* The driver of a veth does not poll: as an uplink it puts packets into a backlog. */
SEC("tp_btf/netif_rx")
int BPF_PROG(fl_backlog, struct sk_buff *skb)
{
	return event(skb, skb->dev, POLL);
}

SEC("tp_btf/netif_receive_skb")
int BPF_PROG(fl_receive, struct sk_buff *skb)
{
	return event(skb, skb->dev, RECEIVE);
}

/* The slot of the tenant of a copy of fl_socket. */
volatile __u32 fl_slot SEC(".data.copy");

/* How packets reach the sockets of a tenant if no device shows their arrival. */
#define BY_UPLINK 1  /* 0: a device does; the sockets are in the host's namespace */
#define BY_MACVLAN 2 /* packets pass from the uplink to the device without an event */
volatile __u8 fl_way SEC(".data.copy");

#define LOOPBACK 1 /* its index in each namespace */

/* Reports whether the packet that a socket receives may be the one that this CPU has delivered. */
static __always_inline int delivered(const struct cpu *c, const struct __sk_buff *skb)
{
	if (!c->since || c->since < fl_attached_at || c->len != skb->len)
		return 0; /* reassembled from fragments, for example */
	if (c->slot)
		return c->slot == fl_slot && c->ifindex == skb->ifindex;
	return fl_way == BY_UPLINK ? c->ifindex == skb->ifindex : fl_way == BY_MACVLAN && skb->ifindex != LOOPBACK;
}

/*
 * A socket of the tenant receives a packet, on the CPU that has delivered it, and before that
 * CPU delivers another.
 */
SEC("cgroup_skb/ingress")
int fl_socket(struct __sk_buff *skb)
{
	struct cpu *c = this_cpu();
	struct record r = {};
	struct tally *t;
	__u64 now;

	if (!c || !delivered(c, skb))
		return 1; /* from loopback, for example */
	now = bpf_ktime_get_ns();
	t = tally_of(fl_slot, INGRESS, c->protocol & 3);
	if (t) {
		for (int i = 0; i < STAGES; i++)
			r.stage[i] = NONE;
		if (!c->slot) {
			increment(&t->seen);
			increment(&t->matched);
			if (c->polled)
				r.stage[FIRST] = between(c->polled, c->since);
			count(t, FIRST, r.stage[FIRST]);
		}
		r.stage[SOCKET] = between(c->since, now);
		r.stage[STACK] = between(c->began, now);
		count(t, SOCKET, r.stage[SOCKET]);
		count(t, STACK, r.stage[STACK]);
		if (c->traced || (!c->slot && fl_tenants[fl_slot & SLOT] & TRACED && may_emit(t, now))) {
			if (!c->slot)
				emit_wait(INGRESS, c->wait, c->id);
			r.at = now;
			r.id = c->id;
			r.slot = fl_slot;
			r.direction = INGRESS;
			r.kind = c->slot ? AT_SOCKET : RECORD;
			r.flow = c->flow;
			fl_emit(&r);
		}
	}
	c->since = 0;
	return 1; /* always passes the packet */
}
