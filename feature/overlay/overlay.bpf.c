//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A cache in front of a container overlay network (ONCache, NSDI 2025): packets of known flows
 * go from the host end of a veth to the uplink, and from the uplink into the container.
 * README.md says what is learnt, and how that ends.
 *
 * Hooks, and cost per event:
 *   tc ingress, host end   fl_ov_send     up to four look-ups; the headers written
 *   tc egress, host end    fl_ov_arrive   a comparison; for a packet out of the tunnel
 *                                         two look-ups, and conntrack's once the flow is
 *                                         no longer young
 *   tc egress, tunnel      fl_ov_tunnel   the same
 *   tc egress, uplink      fl_ov_uplink   a look-up of a per-CPU array; more only for a
 *                                         packet of which fl_ov_tunnel has left a note
 *   tc ingress, uplink     fl_ov_receive  for UDP one look-up, for the tunnel's up to four
 *   tc ingress, the pair into another namespace
 *                          fl_ov_pair     a look-up of a per-CPU array
 *
 * User space writes fl_ov_nets, fl_ov_tunnels, fl_ov_ends, fl_ov_uplinks and fl_ov_beat, and
 * reads fl_ov_counts and the caches. What has no place in a cache takes the slow path. The
 * programs no longer run once the agent has ended.
 */

#include "fate.h"
#include "kernel.h"
#include "parse.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/rtnetlink.h>

char _license[] SEC("license") = "Dual BSD/GPL";

#include "maps.bpf.h"
#include "packet.bpf.h"
#include "learn.bpf.h"
#include "headers.bpf.h"

/* The network whose copy of a program this is. Set before it is loaded. */
const volatile __u32 fl_ov_net;

static __always_inline void count(__u32 net, __u32 dir, enum reason why, __u32 bytes)
{
	struct counts *c = bpf_map_lookup_elem(&fl_ov_counts, &net);

	if (!c || why >= REASONS || dir >= DIRECTIONS)
		return;
	c->packets[dir][why]++;
	c->bytes[dir][why != FAST] += bytes;
}

static __always_inline void passed(__u32 slot, __u32 dir, int slow, __u32 bytes)
{
	struct passed *c = bpf_map_lookup_elem(&fl_ov_passed, &slot);

	if (!c || !slot || dir >= DIRECTIONS)
		return;
	c->packets[dir][!!slow]++;
	c->bytes[dir][!!slow] += bytes;
}

static __always_inline struct end *end_of(__u32 net, __u32 ifindex)
{
	struct end_key at = { .net = net, .ifindex = ifindex };

	return bpf_map_lookup_elem(&fl_ov_ends, &at);
}

static __always_inline struct note *note(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fl_ov_notes, &zero);
}

/* The flow of a packet as its end here sees it. */
static __always_inline void key_of(struct flow_key *key, __u32 net, const struct packet *p, enum direction dir)
{
	key->net = net;
	key->local = dir == OUT ? p->src : p->dst;
	key->remote = dir == OUT ? p->dst : p->src;
	key->lport = dir == OUT ? p->sport : p->dport;
	key->rport = dir == OUT ? p->dport : p->sport;
	key->proto = p->proto;
}

/*
 * Whether a flow may be fast in one direction; by which uplink it is sent, and what NAT makes of the
 * other end.
 */
static __always_inline enum reason fast_flow(struct network *n, const struct packet *p, const struct flow_key *key,
					     enum direction dir, __u32 end, __u64 now, __u32 *uplink, struct side *to)
{
	struct sight *s;
	struct flow *f;
	__u32 tag;

	if (p->proto == IPPROTO_TCP && !midway(p))
		return TCP_FLAGS; /* if the slow path lets it through, that ends the flow: learn_flow */
	s = sight_of(key, &tag);
	if (!s || (__s32)(s->until - ms_of(now)) <= 0)
		return UNKNOWN_FLOW;
	f = bpf_map_lookup_elem(&fl_ov_flows, key);
	if (!f)
		return UNKNOWN_FLOW;
	if (dir == OUT && f->end && f->end != end)
		return HEADER; /* of another container than this flow */
	if (!f->dir[dir == OUT ? OUT : IN].until)
		return UNKNOWN_FLOW;
	if (f->dir[dir == OUT ? OUT : IN].gen != n->gen)
		return GENERATION;
	if (f->dir[dir == OUT ? IN : OUT].gen != n->gen && !f->dir[dir == OUT ? OUT : IN].alone)
		return ONE_WAY;
	if ((__s64)(f->dir[dir == OUT ? OUT : IN].until - now) <= 0)
		return LEASE;
	if (!f->ready)
		return NOT_READY;
	*uplink = f->uplink;
	*to = f->to;
	return !to->seal || to->seal == seal(tag, to) ? FAST : GENERATION;
}

/* Fills in the headers, and writes them; bytes is known when this is compiled. */
static __always_inline int prepend(struct __sk_buff *skb, __u8 *h, __u32 bytes, __u64 l3, struct network *n,
				   const struct packet *p, __u32 hash, int summed, const __u8 *source)
{
	__u16 *data, *from = (void *)h;

	if (!(n->flags & NET_ROUTED))
		__builtin_memcpy(h + INNER_ETH(bytes) + 6, source, 6);
	fill(h, bytes, n, p, hash, summed);
	if (bpf_skb_adjust_room(skb, bytes - ETH_HLEN, BPF_ADJ_ROOM_MAC, ENCAPSULATE(l3)))
		return ROOM;
	data = (void *)(long)skb->data;
	if ((void *)data + bytes > (void *)(long)skb->data_end)
		return -1;
	data[0] = from[0];
	__builtin_memcpy((__u32 *)(data + 1), (__u32 *)(from + 1), bytes - 4); /* aligned: by words */
	data[bytes / 2 - 1] = from[bytes / 2 - 1];
	return FAST;
}

/*
 * Puts the headers in front of the packet. Returns FAST; another reason while the packet is
 * as it was; -1 if it is beyond repair.
 */
static __always_inline int encapsulate(struct __sk_buff *skb, struct network *n, struct remote *r, const struct packet *p,
				       const __u8 *source, const struct flow_key *key, const struct side *to)
{
	__u32 hash = bpf_get_hash_recalc(skb), bytes = r->bytes;
	int err, summed = r->summed && !skb->gso_size;

	if (bytes == V4_HEADERS)
		err = prepend(skb, r->headers, V4_HEADERS, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, n, p, hash, summed, source);
	else
		err = prepend(skb, r->headers, V6_HEADERS, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, n, p, hash, summed, source);
	if (err == FAST && ((n->flags & NET_ROUTED && !hop(skb, bytes, p->v6)) ||
			    (to->seal && translate(skb, bytes, p, key, to, OUT))))
		return -1;
	return err;
}

/* A container begins or ends a connection: where learn_flow sees it, that to a service has another key. */
static __always_inline void ended(const struct flow_key *key, __u32 ifindex, __u64 now)
{
	struct host_key host = { .net = fl_ov_net, .ip = key->local };
	struct local *l;
	__u32 tag;
	struct sight *s = sight_of(key, &tag);

	if (!s || (__s32)(s->until - ms_of(now)) <= 0)
		return;
	l = bpf_map_lookup_elem(&fl_ov_locals, &host);
	if (l && l->ifindex == ifindex)
		end_flow(s, key, now);
}

/* The learnt way of a packet that a container sends. */
static __always_inline int send(struct __sk_buff *skb, struct network *n, struct packet *p, __u32 *up, __u32 *slot)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	struct host_key host = { .net = fl_ov_net };
	struct flow_key key = {};
	struct side to = {};
	struct remote r, *known;
	struct local *l;
	struct ethhdr *eth;
	enum reason why;

	key_of(&key, fl_ov_net, p, OUT);
	why = fast_flow(n, p, &key, OUT, skb->ifindex, now, up, &to);
	if (why == TCP_FLAGS)
		ended(&key, skb->ifindex, now);
	if (why != FAST)
		return why;
	if (p->length + ETH_HLEN != skb->len)
		return CUT;
	host.ip = p->src;
	l = bpf_map_lookup_elem(&fl_ov_locals, &host);
	if (!l || l->gen != n->gen)
		return NO_LOCAL;
	if (to.seal)
		p->dst = to.ip;
	host.ip = p->dst;
	host.uplink = *up;
	known = bpf_map_lookup_elem(&fl_ov_remotes, &host);
	if (!known)
		return NO_REMOTE;
	r = *known;
	if (r.gen != n->gen || r.self.net != fl_ov_net || r.self.uplink != *up || !same_ip(&r.self.ip, &p->dst))
		return NO_REMOTE; /* or another's by now */
	if ((__s64)(r.until - now) <= 0)
		return LEASE;
	if (!(l->way & WAY_OUT))
		return WAY;
	/* Anew: Linux 6.1 forgets what it knows of the packet's bounds on the way here. */
	eth = (void *)(long)skb->data;
	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return CUT;
	/* From the container that has this address, to where the slow path takes it from there. */
	if (l->ifindex != skb->ifindex || !same(eth->h_source, l->mac, 6))
		return HEADER;
	if (n->flags & NET_ROUTED	? !same(eth->h_dest, l->gateway, 6) :
	    r.bytes == V6_HEADERS ? !same(eth->h_dest, r.headers + INNER_ETH(V6_HEADERS), 6) :
				    !same(eth->h_dest, r.headers + INNER_ETH(V4_HEADERS), 6))
		return HEADER;
	if (n->flags & NET_ROUTED && p->ttl <= 1)
		return TTL;
	if (!fits(skb, n, &r, p))
		return MTU;
	/*
	 * The kernel would cut a super-packet into segments without outer checksums. IPv6
	 * demands them, and what UDP has no checksum inside does not add up.
	 */
	if (r.summed && (p->unsummed || (skb->gso_size && r.bytes == V6_HEADERS)))
		return CHECKSUM;
	*slot = l->slot;
	return encapsulate(skb, n, &r, p, eth->h_source, &key, &to);
}

SEC("tc")
int fl_ov_send(struct __sk_buff *skb)
{
	__u32 net = fl_ov_net, bytes = skb->len, slot = 0, up = 0;
	struct network *n = bpf_map_lookup_elem(&fl_ov_nets, &net);
	struct packet p = {};
	struct note *hand;
	struct end *e;
	int why;

	hand = note();
	if (!n || !hand || !(n->flags & NET_ON))
		return TCX_NEXT; /* nothing is fast now */
	hand->sent = bpf_get_prandom_u32() % TIMED_IN ? 0 : bpf_ktime_get_ns();
	hand->sent_net = net;
	hand->sent_way = 0;
	why = parse_frame(skb, &p);
	if (why == FAST)
		why = send(skb, n, &p, &up, &slot);
	if (why == -1)
		return TCX_DROP; /* half of the headers could be written: cannot be */
	count(net, OUT, why, bytes);
	if (why != FAST) {
		e = end_of(net, skb->ifindex);
		passed(e ? e->slot : 0, OUT, 1, bytes);
		return TCX_NEXT; /* the slow path decides */
	}
	passed(slot, OUT, 0, bytes);
	hand->sent_way = TIMED_FAST;
	if (!n->inside)
		return bpf_redirect(up, 0);
	hand->to = up;
	hand->way = 0;
	return bpf_redirect_peer(n->inside, 0);
}

/* Where a packet out of the tunnel is given to a container. */
SEC("tc")
int fl_ov_arrive(struct __sk_buff *skb)
{
	__u32 net = fl_ov_net;
	struct network *n = bpf_map_lookup_elem(&fl_ov_nets, &net);
	struct host_key host = { .net = net };
	struct flow_key key = {};
	struct local l = {}, *known;
	struct packet p = {};
	struct ethhdr *eth;
	struct end *e;
	__u64 now;

	if (!n || skb->ingress_ifindex != n->tunnel || !(n->flags & NET_ON))
		return TCX_NEXT; /* not out of the tunnel, or nothing is fast now */
	e = end_of(net, skb->ifindex);
	if (!e)
		return TCX_NEXT; /* no end that may be fast */
	passed(e->slot, IN, 1, skb->len);
	now = bpf_ktime_get_coarse_ns();
	if (!learns(n, now))
		return TCX_NEXT;
	if (parse_frame(skb, &p) != FAST)
		return TCX_NEXT;
	eth = (void *)(long)skb->data;
	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return TCX_NEXT;
	if (!same(eth->h_dest, e->mac, 6))
		return TCX_NEXT; /* flooded by the bridge, or for many */
	__builtin_memcpy(l.mac, eth->h_dest, 6);
	__builtin_memcpy(l.gateway, eth->h_source, 6);
	key_of(&key, net, &p, IN);
	if (!learn_flow(skb, n, &p, &key, IN, e->slot, now))
		return TCX_NEXT;
	host.ip = p.dst;
	l.until = now + LEASE_NS;
	l.gen = n->gen;
	l.ifindex = skb->ifindex;
	l.way = e->way;
	l.tenant = e->tenant;
	l.slot = e->slot;
	l.mtu = e->mtu;
	known = bpf_map_lookup_elem(&fl_ov_locals, &host);
	if (known && known->gen == l.gen && known->ifindex == l.ifindex && known->way == l.way && known->mtu == l.mtu &&
	    same(known->mac, l.mac, 6) && same(known->gateway, l.gateway, 6))
		known->until = l.until;
	else
		bpf_map_update_elem(&fl_ov_locals, &host, &l, BPF_ANY);
	return TCX_NEXT; /* only looked at */
}

/* At the tunnel device: the slow path sends a packet to another host. */
SEC("tc")
int fl_ov_tunnel(struct __sk_buff *skb)
{
	__u32 net = fl_ov_net;
	struct network *n = bpf_map_lookup_elem(&fl_ov_nets, &net);
	struct host_key host = { .net = net };
	struct note *to = note();
	struct flow_key key = {};
	struct packet p = {};
	struct local *l;
	struct end *e;
	__u32 slot;
	__u64 now;

	if (!n || !to)
		return TCX_NEXT; /* cannot be */
	to->flow.net = 0;
	if (to->sent_net == net)
		to->sent_way = TIMED_SLOW;
	now = bpf_ktime_get_coarse_ns();
	if (!learns(n, now))
		return TCX_NEXT;
	if (parse_frame(skb, &p) != FAST)
		return TCX_NEXT;
	key_of(&key, net, &p, OUT);
	if (n->flags & NET_ROUTED) {
		host.ip = p.src;
		l = bpf_map_lookup_elem(&fl_ov_locals, &host);
		slot = l ? l->slot : 0;
	} else {
		e = end_of(net, skb->ingress_ifindex);
		slot = e ? e->slot : 0;
	}
	/* Of a container here that may be fast. */
	to->entry = key;
	if (!slot || !learn_flow(skb, n, &p, &to->entry, OUT, slot, now))
		return TCX_NEXT;
	to->at = now;
	to->socket = bpf_get_socket_cookie(skb);
	to->flow = key;
	return TCX_NEXT; /* only looked at */
}

/* Takes the time of a packet that has come to the uplink. */
static __always_inline void timed(struct note *from)
{
	__u64 took = bpf_ktime_get_ns() - from->sent;
	__u32 net = from->sent_net, slow = from->sent_way == TIMED_SLOW;
	struct counts *c = bpf_map_lookup_elem(&fl_ov_counts, &net);

	from->sent = 0;
	if (!c || !from->sent_way || took > TIMED_NS)
		return;
	c->timed[slow]++;
	c->ns[slow] += took;
}

/* At the uplink: what the tunnel device has made of the packet. */
SEC("tc")
int fl_ov_uplink(struct __sk_buff *skb)
{
	struct note *from = note();
	struct host_key host = {};
	struct flow_key key;
	struct packet p = {};
	struct remote *r, *known;
	struct network *n;
	struct flow *f;
	struct uplink *by;
	__u32 route, up = skb->ifindex, net, bytes, renewed = 0;
	__u64 now;

	if (from && from->sent)
		timed(from);
	if (!from || !from->flow.net)
		return TCX_NEXT; /* not out of a tunnel of which something is to be learnt */
	key = from->flow;
	net = key.net;
	from->flow.net = 0;
	now = bpf_ktime_get_coarse_ns();
	n = bpf_map_lookup_elem(&fl_ov_nets, &net);
	by = bpf_map_lookup_elem(&fl_ov_uplinks, &up);
	r = &from->remote;
	/*
	 * A tunnel device gives its packets the look of this host's own. One that is forwarded,
	 * or another socket's, may have been made to look like the one of the note.
	 */
	if (!n || !by || now - from->at > NOTE_NS || skb->ingress_ifindex || skb->vlan_present ||
	    bpf_get_socket_cookie(skb) != from->socket)
		return TCX_NEXT;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		bytes = V4_HEADERS;
		if (bpf_skb_load_bytes(skb, 0, r->headers, V4_HEADERS) || !noted(r->headers, V4_HEADERS, n))
			return TCX_NEXT;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		bytes = V6_HEADERS;
		if (bpf_skb_load_bytes(skb, 0, r->headers, V6_HEADERS) || !noted(r->headers, V6_HEADERS, n))
			return TCX_NEXT;
	} else {
		return TCX_NEXT;
	}
	linear(skb, bytes + 48);
	if (parse_inner(skb, bytes, *(__be16 *)(r->headers + bytes - 2), &p) != FAST)
		return TCX_NEXT;
	if (!same_ip(&p.dst, &key.remote) || !same_ip(&p.src, &key.local) || p.sport != key.lport || p.dport != key.rport)
		return TCX_NEXT; /* another packet */
	f = bpf_map_lookup_elem(&fl_ov_flows, &from->entry);
	if (f)
		f->uplink = up;
	f = f && f->to.seal ? bpf_map_lookup_elem(&fl_ov_flows, &key) : 0;
	if (f)
		f->uplink = up; /* answers of a service: known by what comes on the wire */
	host.net = net;
	host.uplink = up;
	host.ip = p.dst;
	r->self = host;
	r->until = now + LEASE_NS;
	r->gen = n->gen;
	route = route_mtu(skb);
	r->mtu = route && route < by->mtu ? route : by->mtu;
	r->bytes = bytes;
	r->summed = !!*(__u16 *)(r->headers + bytes - ETH_HLEN - 8 - 2);
	known = bpf_map_lookup_elem(&fl_ov_remotes, &host);
	if (known && known->gen == r->gen && known->bytes == bytes && known->mtu == r->mtu &&
	    known->summed == r->summed)
		renewed = bytes == V4_HEADERS ? same_v4(known->headers, r->headers) : same_v6(known->headers, r->headers);
	if (renewed)
		known->until = r->until;
	else
		bpf_map_update_elem(&fl_ov_remotes, &host, r, BPF_ANY);
	return TCX_NEXT; /* only looked at */
}

#include "receive.bpf.h"

/* Run by user space, once conntrack takes packets of a flow whatever it did not see. */
SEC("syscall")
int fl_ov_ready(struct flow_key *made)
{
	struct flow_key key = *made;
	struct flow *f = bpf_map_lookup_elem(&fl_ov_flows, &key);

	if (f)
		f->ready = READY;
	return !f;
}
