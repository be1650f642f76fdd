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

struct nf_conn {
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

/*
 * What conntrack says of a packet, in the namespace of the device that it is at. Behind NAT
 * the packet is no tuple, but turned around it is: that is found too, and no.
 */
static __always_inline enum track tracked(struct __sk_buff *skb, const struct packet *p)
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
	    !(status & (CT_NAT | CT_DYING | CT_HELPER)) &&
	    (p->proto != IPPROTO_TCP || ct->proto.tcp.state == CT_TCP_ESTABLISHED))
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

/*
 * Learns that the slow path has let a packet of this flow through. Reports whether the
 * flow is worth more: old enough, and allowed. So is young UDP with an answer: if all of
 * it goes one way from now on, nothing else tells where the answers go.
 */
static __always_inline int learn_flow(struct __sk_buff *skb, struct network *n, const struct packet *p,
				      const struct flow_key *key, enum direction dir, __u32 slot, __u64 now)
{
	struct flow made = { .learnt = now, .slot = slot }, *f;
	__u32 tag, dirs = 1 << dir;
	struct sight *s = sight_of(key, &tag);
	struct seen *seen, *other;
	enum track t;

	if (!s)
		return 0; /* cannot be */
	if (p->proto == IPPROTO_TCP && !midway(p)) {
		/* A connection begins or ends: conntrack sees all of it. */
		s->tag = 0;
		f = (__s32)(s->until - ms_of(now)) > 0 ? bpf_map_lookup_elem(&fl_ov_flows, key) : 0;
		slot = f ? f->slot : 0;
		if (f && !bpf_map_delete_elem(&fl_ov_flows, key))
			hold(slot, -1);
		return 0;
	}
	if (!(p->proto == IPPROTO_TCP && n->flags & NET_EAGER)) {
		dirs = seen_before(s, tag, dir, now);
		if (!dirs)
			return p->proto == IPPROTO_UDP && s->dirs == (1 << OUT | 1 << IN);
	}
	f = bpf_map_lookup_elem(&fl_ov_flows, key);
	t = tracked(skb, p);
	if (t == NO)
		return 0;
	if (!f) {
		if (!hold(slot, 1))
			return 0; /* no room for more of this end at the moment */
		if (bpf_map_update_elem(&fl_ov_flows, key, &made, BPF_NOEXIST))
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
