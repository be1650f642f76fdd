/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Learning: what may be learnt of a packet that the slow path has let through. */

/* include/net/netfilter/nf_conntrack_bpf.c; 12 bytes are what every kernel takes. */
struct bpf_ct_opts___fl {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

struct ip_ct_tcp {
	__u8 state;
} __kernel_type;

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} __kernel_type;

struct nf_conntrack_tuple {
	struct {
		struct in6_addr u3, u; /* address and port; unions, of which only the place counts */
	} src, dst;
} __kernel_type;

struct nf_conn {
	struct {
		struct nf_conntrack_tuple tuple;
	} tuplehash[2]; /* of the first packet, and of its answers */
	unsigned long status;
	union nf_conntrack_proto proto;
} __kernel_type;

struct sk_buff___whole {
	unsigned long _nfct; /* absent without conntrack */
	unsigned long _skb_refdst;
} __kernel_type;

struct dst_entry {
	unsigned long _metrics;
} __kernel_type;

struct rtable {
	struct dst_entry dst;
	__u32 rt_mtu_locked : 1, rt_pmtu : 31;
} __kernel_type;

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32,
					 struct bpf_ct_opts___fl *, __u32) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *) __ksym __weak;
extern void *bpf_cast_to_kern_ctx(void *) __ksym __weak;

/*
 * Whether the kernel has bpf_skb_ct_lookup. Set before a program is loaded, as the address
 * of a function in a module cannot be asked for.
 */
const volatile __u8 fl_ov_tracks;

/* include/uapi/linux/netfilter/nf_conntrack_common.h and nf_conntrack_tcp.h */
#define CT_SEEN_REPLY (1 << 1)
#define CT_CONFIRMED (1 << 3)
#define CT_NAT (7 << 4) /* or changed sequence numbers */
#define CT_DST_NAT (1 << 5)
#define CT_DYING (1 << 9)
#define CT_HELPER (1 << 13)
#define CT_TCP_ESTABLISHED 3

enum track {
	NO,	   /* not established, or not for the fast path at all */
	TRACKED,   /* established */
	NOT_TRACKED, /* conntrack does not know it */
};

static __always_inline struct nf_conn *find(struct __sk_buff *skb, const struct packet *p, int turned)
{
	struct bpf_ct_opts___fl opts = { .netns_id = -1, .l4proto = p->proto };
	const struct fl_address *src = turned ? &p->dst : &p->src, *dst = turned ? &p->src : &p->dst;
	__u16 sport = turned ? p->dport : p->sport, dport = turned ? p->sport : p->dport;
	struct bpf_sock_tuple t = {};

	if (p->v6) {
		__builtin_memcpy(t.ipv6.saddr, src, 16);
		__builtin_memcpy(t.ipv6.daddr, dst, 16);
		t.ipv6.sport = sport;
		t.ipv6.dport = dport;
		return bpf_skb_ct_lookup(skb, &t, sizeof(t.ipv6), &opts, sizeof(opts));
	}
	__builtin_memcpy(&t.ipv4.saddr, &src->ip[12], 4);
	__builtin_memcpy(&t.ipv4.daddr, &dst->ip[12], 4);
	t.ipv4.sport = sport;
	t.ipv4.dport = dport;
	return bpf_skb_ct_lookup(skb, &t, sizeof(t.ipv4), &opts, sizeof(opts));
}

/* Whether conntrack has a packet that it does not find: in a zone. Before Linux 6.2 nothing tells. */
static __always_inline int has_entry(struct __sk_buff *skb)
{
	struct sk_buff___whole *whole = 0;

	if (!bpf_cast_to_kern_ctx || !bpf_core_field_exists(whole->_nfct))
		return 0;
	whole = bpf_cast_to_kern_ctx(skb);
	return !!(whole->_nfct & ~7UL);
}

/* Reads one end of a connection. Reports whether it is a given one. */
static __always_inline int side_is(struct side *s, const void *ip, const void *port, __u32 v6,
				   const struct fl_address *want, __u16 at)
{
	__builtin_memset(s, 0, sizeof(*s));
	if (v6) {
		bpf_probe_read_kernel(&s->ip, sizeof(s->ip), ip);
	} else {
		s->ip.ip[10] = s->ip.ip[11] = 0xff;
		bpf_probe_read_kernel(&s->ip.ip[12], 4, ip);
	}
	bpf_probe_read_kernel(&s->port, sizeof(s->port), port);
	return s->port == at && same_ip(&s->ip, want);
}

#define SIDE_IS(s, end, ip, port) side_is(s, &(end).u3, &(end).u, v6, &(ip), port)

/*
 * Whether a connection is one that a container here has begun, of which nothing but the
 * destination is changed: to a service. The remote end of key, that of a packet here, then
 * becomes what it was when the packet came.
 */
static __always_inline int to_service(struct nf_conn *ct, struct flow_key *key, enum direction dir, __u32 v6)
{
	struct nf_conntrack_tuple *first = &ct->tuplehash[0].tuple, *answer = &ct->tuplehash[1].tuple;
	struct side s;
	int ours;

	if (!SIDE_IS(&s, first->src, key->local, key->lport) || !SIDE_IS(&s, answer->dst, key->local, key->lport))
		return 0;
	if (dir == OUT)
		ours = SIDE_IS(&s, answer->src, key->remote, key->rport) && !SIDE_IS(&s, first->dst, key->remote, key->rport);
	else
		ours = SIDE_IS(&s, first->dst, key->remote, key->rport) && !SIDE_IS(&s, answer->src, key->remote, key->rport);
	if (!ours)
		return 0;
	key->remote = s.ip;
	key->rport = s.port;
	return 1;
}

/*
 * What conntrack says of a packet, in the namespace of the device that it is at. Behind NAT
 * the packet is no tuple, but turned around it is. key becomes that of the packet as it came;
 * other NAT than of a service is no.
 */
static __always_inline enum track tracked(struct __sk_buff *skb, struct network *n, const struct packet *p,
					  struct flow_key *key, enum direction dir)
{
	struct nf_conn *ct;
	enum track t = NO;
	unsigned long status;

	if (!fl_ov_tracks)
		return NOT_TRACKED;
	ct = find(skb, p, 0);
	if (!ct)
		ct = find(skb, p, 1);
	if (!ct)
		return p->proto == IPPROTO_TCP && has_entry(skb) ? NO : NOT_TRACKED;
	status = ct->status;
	if ((status & (CT_SEEN_REPLY | CT_CONFIRMED)) == (CT_SEEN_REPLY | CT_CONFIRMED) &&
	    !(status & (CT_DYING | CT_HELPER)) &&
	    (p->proto != IPPROTO_TCP || ct->proto.tcp.state == CT_TCP_ESTABLISHED) &&
	    ((n->flags & NET_ROUTED && !(status & CT_NAT & ~CT_DST_NAT) && to_service(ct, key, dir, p->v6)) ||
	     !(status & CT_NAT))) /* IPVS says of no packet that it changes it */
		t = TRACKED;
	bpf_ct_release(ct);
	return t;
}

/*
 * What the route of a packet that this host sends takes, by what its path has told, or by its own
 * MTU; 0: as much as the device. Before Linux 6.2 nothing tells.
 */
static __always_inline __u32 route_mtu(struct __sk_buff *skb)
{
	struct sk_buff___whole *whole;
	const __u32 *metrics;
	struct rtable *rt;
	__u32 mtu = 0;

	if (!bpf_cast_to_kern_ctx)
		return 0;
	whole = bpf_cast_to_kern_ctx(skb);
	rt = (void *)(whole->_skb_refdst & ~1UL);
	if (rt && skb->protocol == bpf_htons(ETH_P_IP))
		mtu = BPF_CORE_READ_BITFIELD_PROBED(rt, rt_pmtu);
	if (!rt || mtu)
		return mtu;
	metrics = (void *)(BPF_CORE_READ(rt, dst._metrics) & ~3UL);
	bpf_probe_read_kernel(&mtu, sizeof(mtu), metrics + RTAX_MTU - 1);
	return mtu;
}

/* Whether anything may be learnt of a network. */
static __always_inline int learns(const struct network *n, __u64 now)
{
	__u32 zero = 0;
	__u64 *until = bpf_map_lookup_elem(&fl_ov_beat, &zero);

	return n->flags & NET_ON && (__s64)(now - n->from) >= 0 && until && (__s64)(*until - now) > 0;
}

/* Asks user space to make conntrack ready for a flow. */
static __always_inline void ask(struct flow *f, const struct flow_key *key, __u64 now)
{
	if (now - f->asked < ASK_NS)
		return;
	f->asked = now;
	bpf_ringbuf_output(&fl_ov_asks, (void *)key, sizeof(*key), 0);
}

static __always_inline __u32 ms_of(__u64 ns) { return ns / 1000000; }

/* Nobody can choose flows that share a place with another's. Set before a program is loaded. */
const volatile __u64 fl_ov_secret;

/* The place of a flow in the small table; tag tells it from most others there. */
static __always_inline struct sight *sight_of(const struct flow_key *key, __u32 *tag)
{
	const __u32 *l = (void *)&key->local, *r = (void *)&key->remote;
	__u64 h = fl_ov_secret ^ ((__u64)key->net << 40 | (__u64)key->proto << 32 | (__u32)key->lport << 16 | key->rport);
	__u32 at;

#pragma unroll
	for (int i = 0; i < 4; i++)
		h = fl_mix(h, (__u64)l[i] << 32 | r[i]);
	at = h & (MAX_SIGHTS - 1);
	*tag = h >> 32;
	return bpf_map_lookup_elem(&fl_ov_sights, &at);
}

/* The directions in which a flow was seen, if that began a while or some packets ago; else 0. */
static __always_inline __u32 seen_before(struct sight *s, __u32 tag, enum direction dir, __u64 now)
{
	__u32 ms = ms_of(now);

	if (s->tag != tag) {
		s->tag = tag;
		s->first = ms;
		s->dirs = 1 << dir;
		s->packets = 0;
		return 0;
	}
	s->dirs |= 1 << dir;
	return ++s->packets >= YOUNG_PACKETS || ms - s->first >= YOUNG_MS ? s->dirs : 0;
}

/*
 * Counts flows of an end that come or go. None comes to an end that has as many as there is room
 * for more: of n ends that want all, each gets one part of n + 1, and so does the next one.
 */
static __always_inline int hold(__u32 slot, __s64 more)
{
	__u32 zero = 0;
	__s64 *held = bpf_map_lookup_elem(&fl_ov_held, &slot), *all = bpf_map_lookup_elem(&fl_ov_held, &zero);

	if (!held || !all || (more > 0 && *held + *all >= MAX_FLOWS))
		return 0;
	__sync_fetch_and_add(held, more);
	__sync_fetch_and_add(all, more);
	return 1;
}

static __always_inline __u32 seal(__u32 tag, const struct side *to)
{
	const __u32 *ip = (void *)&to->ip;
	__u64 h = fl_mix(fl_mix(tag, (__u64)ip[0] << 32 | ip[1]), (__u64)ip[2] << 32 | ip[3]);

	return fl_mix(h, to->port) >> 32 ?: 1;
}

/* Deletes the entry of a flow, if the place says that there may be one. */
static __always_inline void end_flow(const struct sight *s, const struct flow_key *key, __u64 now)
{
	struct flow *f = (__s32)(s->until - ms_of(now)) > 0 ? bpf_map_lookup_elem(&fl_ov_flows, key) : 0;
	__u32 slot = f ? f->slot : 0;

	if (f && !bpf_map_delete_elem(&fl_ov_flows, key))
		hold(slot, -1);
}

/*
 * Learns that the slow path has let a packet of this flow through; key becomes that of its entry.
 * Reports whether the flow is worth more: old enough, and allowed. So is young UDP with an answer,
 * and one that comes: if all of it goes one way from now on, nothing else tells where the answers go.
 */
static __always_inline int learn_flow(struct __sk_buff *skb, struct network *n, const struct packet *p,
				      struct flow_key *key, enum direction dir, __u32 slot, __u64 now)
{
	struct flow made = { .learnt = now, .slot = slot, .to.ip = key->remote, .to.port = key->rport }, *f;
	__u32 tag, dirs;
	struct sight *s = sight_of(key, &tag);
	struct seen *seen, *other;
	enum track t;

	if (!s)
		return 0; /* cannot be */
	if (p->proto == IPPROTO_TCP && !midway(p)) {
		/* A connection begins or ends: conntrack sees all of it. */
		s->tag = 0;
		end_flow(s, key, now);
		return 0;
	}
	dirs = seen_before(s, tag, dir, now);
	if (!dirs)
		return p->proto == IPPROTO_UDP && (dir == IN || s->dirs == (1 << OUT | 1 << IN));
	t = tracked(skb, n, p, key, dir);
	if (t == NO)
		return 0;
	if (made.to.port != key->rport || !same_ip(&made.to.ip, &key->remote)) {
		s = sight_of(key, &tag);
		if (!s)
			return 0; /* cannot be */
		dirs = 0; /* seen of the other direction was another flow */
		made.to.seal = seal(tag, &made.to);
	}
	f = bpf_map_lookup_elem(&fl_ov_flows, key);
	if (!f || f->to.seal != made.to.seal) { /* or it goes elsewhere by now */
		if (!hold(slot, 1))
			return 0; /* no room for more of this end at the moment */
		if (bpf_map_update_elem(&fl_ov_flows, key, &made, f ? BPF_EXIST : BPF_NOEXIST) || f)
			hold(slot, -1);
		f = bpf_map_lookup_elem(&fl_ov_flows, key);
		if (!f)
			return 0; /* others have taken the last places */
		if (dirs & 1 << (dir == OUT ? IN : OUT))
			f->dir[dir == OUT ? IN : OUT].gen = n->gen;
	}
	seen = &f->dir[dir == OUT ? OUT : IN];
	other = &f->dir[dir == OUT ? IN : OUT];
	if (now > seen->until + KEPT_NS && now > other->until + KEPT_NS)
		f->ready = 0; /* it may be another connection by now */
	if (!seen->until)
		seen->seq = p->seq;
	s->until = ms_of(now + LEASE_NS + KEPT_NS);
	seen->gen = n->gen;
	seen->alone = t == TRACKED;
	seen->until = now + LEASE_NS;
	if (dir == OUT)
		f->end = n->flags & NET_ROUTED ? 0 : skb->ingress_ifindex;
	if (t == NOT_TRACKED || p->proto != IPPROTO_TCP || n->flags & NET_LIBERAL)
		f->ready = UNTRACKED;
	else if (f->ready == UNTRACKED)
		f->ready = 0;
	/* What conntrack knows of sequence numbers stays behind, until they seem to be earlier ones. */
	if (f->ready == READY && p->seq - seen->seq > ASK_BYTES) {
		seen->seq = p->seq;
		ask(f, key, now);
	}
	if (!f->ready && (seen->alone || other->gen == n->gen))
		ask(f, key, now);
	return 1;
}
