/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The way of a received packet: from the uplink into the container. */

/* A tunnel's packet, as far as its outer headers go. */
struct outer {
	__u32 net;
	__u32 bytes; /* of the headers up to the inner Ethernet header and with it */
	__u32 word;  /* first one of the tunnel's header */
	__u8 tos;
	__u8 summed;
	__be16 inner; /* type of the inner frame */
};

/*
 * Reads the outer headers. Returns FAST, or why the packet is none for the fast path; o->net
 * stays 0 for one that is no network's of ours.
 */
static __always_inline enum reason parse_outer(struct __sk_buff *skb, struct outer *o)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data;
	struct tunnel key = {};
	struct udp *udp;
	__u32 length, *words, *net;
	enum reason why = FAST;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + OUTER_IP;

		if (data + V4_HEADERS > end || ip->protocol != IPPROTO_UDP || *(__u8 *)ip != 0x45)
			return PROTOCOL;
		o->bytes = V4_HEADERS;
		o->tos = ip->tos;
		length = bpf_ntohs(ip->tot_len) - sizeof(*ip);
		if (ip->frag_off & bpf_htons(0x3fff))
			why = FRAGMENT;
		else if (fold(sum_of(ip, 10)) != 0xffff)
			why = CHECKSUM;
		udp = (void *)(ip + 1);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + OUTER_IP;

		if (data + V6_HEADERS > end || ip->version != 6 || ip->nexthdr != IPPROTO_UDP)
			return PROTOCOL;
		o->bytes = V6_HEADERS;
		o->tos = ip->priority << 4 | ip->flow_lbl[0] >> 4;
		key.v6 = 1;
		length = bpf_ntohs(ip->payload_len);
		udp = (void *)(ip + 1);
	} else {
		return PROTOCOL;
	}
	words = (void *)(udp + 1);
	key.port = udp->dest;
	key.vni = words[1];
	net = bpf_map_lookup_elem(&fl_ov_tunnels, &key);
	if (!net)
		return PROTOCOL;
	o->net = *net;
	if (eth->h_proto != skb->protocol)
		return PROTOCOL; /* a VLAN tag in the frame */
	if (why != FAST)
		return why;
	o->word = words[0];
	o->summed = !!udp->check;
	o->inner = *(__be16 *)((void *)(words + 2) + 12);
	if (!o->summed && key.v6)
		return CHECKSUM; /* the kernel refuses it, unless the device allows it */
	/* o->bytes without Ethernet, IP: of a known length, so that the lengths agree. */
	if (bpf_ntohs(udp->length) != length || length + o->bytes - ETH_HLEN - 8 - 8 != skb->len)
		return CUT;
	return FAST;
}

/*
 * Whether the headers of a received packet are those that would be sent to where it comes
 * from, with source and destination changed over. It comes by another uplink unless one_way.
 */
static __always_inline enum reason reverse(const __u8 *got, struct network *n, struct remote *r, struct local *l,
					   __u32 bytes, __u32 one_way)
{
	const __u8 *sent = r->headers;

	if (bytes == V4_HEADERS ?
		    !same(got + OUTER_IP + 12, sent + OUTER_IP + 16, 4) || !same(got + OUTER_IP + 16, sent + OUTER_IP + 12, 4) :
		    !same(got + OUTER_IP + 8, sent + OUTER_IP + 24, 16) || !same(got + OUTER_IP + 24, sent + OUTER_IP + 8, 16))
		return SOURCE;
	if (one_way && !same(got, sent + 6, 6))
		return HEADER; /* not to this uplink's address */
	if (!same(got + INNER_ETH(bytes) + 6, sent + INNER_ETH(bytes), 6))
		return HEADER;
	/* To the tunnel device that has the route, or to the container: others send there as well. */
	if (n->flags & NET_ROUTED ? !same(got + INNER_ETH(bytes), sent + INNER_ETH(bytes) + 6, 6) :
				    !same(got + INNER_ETH(bytes), l->mac, 6))
		return HEADER;
	return FAST;
}

/* BPF_F_ADJ_ROOM_DECAP_L3_IPV4 and _IPV6 (6.3): what is inside is of the other family. */
#define DECAP_IPV4 (1ULL << 7)
#define DECAP_IPV6 (1ULL << 8)
#define DECAPSULATE (BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET)

/* Takes the outer headers away. Returns as encapsulate does. */
static __always_inline int decapsulate(struct __sk_buff *skb, struct network *n, struct local *l,
				       const struct packet *p, __u32 bytes)
{
	__u32 mac[3], *at; /* copied by words, as clang takes pointers to be aligned */
	__be16 type = p->v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	__u64 flags = DECAPSULATE;

	if (p->v6 != (bytes == V6_HEADERS))
		flags |= p->v6 ? DECAP_IPV6 : DECAP_IPV4;
	if (n->flags & NET_ROUTED) {
		at = (void *)l->mac; /* and the gateway's behind it */
		__builtin_memcpy(mac, at, sizeof(mac));
	} else {
		at = (void *)(long)skb->data + INNER_ETH(bytes);
		if ((void *)at + ETH_HLEN > (void *)(long)skb->data_end)
			return CUT;
		__builtin_memcpy(mac, at, sizeof(mac));
	}
	if (bpf_skb_adjust_room(skb, -(__s32)(bytes - ETH_HLEN), BPF_ADJ_ROOM_MAC, flags))
		return ROOM;
	/* One checksum less that the NIC has verified; an error is that it has verified none. */
	bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	if (n->flags & NET_ROUTED && !hop(skb, ETH_HLEN, p->v6))
		return -1;
	at = (void *)(long)skb->data;
	if ((void *)at + ETH_HLEN > (void *)(long)skb->data_end)
		return -1;
	__builtin_memcpy(at, mac, sizeof(mac));
	*(__be16 *)(at + 3) = type;
	return FAST;
}

/* Whether two uplinks are next hops of the same routes: packets go by one, and come by any. */
static __always_inline int together(__u32 a, __u32 b)
{
	struct uplink *x = bpf_map_lookup_elem(&fl_ov_uplinks, &a), *y = bpf_map_lookup_elem(&fl_ov_uplinks, &b);

	return x && y && x->group && x->group == y->group;
}

/* The learnt way of a packet out of a tunnel. */
static __always_inline int receive(struct __sk_buff *skb, struct network *n, struct outer *o, struct local **to, __u8 *proto)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u64 now = bpf_ktime_get_coarse_ns();
	struct host_key host = { .net = o->net };
	struct flow_key key = {};
	struct packet p = {};
	struct side seen = {};
	struct remote *r;
	struct local *l;
	__u32 up = 0;
	int why;

	if (o->word != n->word)
		return HEADER; /* flags, or options */
	why = parse_inner(skb, o->bytes, o->inner, &p);
	if (why != FAST)
		return why;
	if (p.length + o->bytes != skb->len)
		return CUT;
	key_of(&key, o->net, &p, IN);
	why = fast_flow(n, &p, &key, IN, 0, now, &up, &seen);
	if (why != FAST)
		return why;
	up = up ?: skb->ifindex;
	if (up != skb->ifindex && !together(up, skb->ifindex))
		return SOURCE;
	host.ip = p.src;
	host.uplink = up;
	r = bpf_map_lookup_elem(&fl_ov_remotes, &host);
	if (!r || r->gen != n->gen || r->bytes != o->bytes)
		return NO_REMOTE;
	host.ip = p.dst;
	host.uplink = 0;
	l = bpf_map_lookup_elem(&fl_ov_locals, &host);
	if (!l || l->gen != n->gen)
		return NO_LOCAL;
	if (o->bytes == V4_HEADERS)
		why = reverse(data, n, r, l, V4_HEADERS, up == skb->ifindex);
	else
		why = data + V6_HEADERS > end ? CUT : reverse(data, n, r, l, V6_HEADERS, up == skb->ifindex);
	if (why != FAST)
		return why;
	if ((__s64)(l->until - now) <= 0)
		return LEASE;
	if (!(l->way & (WAY_PEER | WAY_END)))
		return WAY;
	if (n->flags & NET_ROUTED && p.ttl <= 1)
		return TTL;
	/* Congestion on the way, or a codepoint that decapsulation would have to combine. */
	if (o->tos & 3 && (o->tos ^ p.tos) & 3 && !((o->tos & 3) == 2 && (p.tos & 3) == 3))
		return HEADER;
	if ((skb->gso_size ? p.headers + skb->gso_size : p.length) > (n->mtu < l->mtu ? n->mtu : l->mtu))
		return MTU;
	/* What GRO has joined it has verified before. */
	if (o->summed && !skb->gso_size) {
		if (p.unsummed)
			return CHECKSUM;
		if (o->bytes == V4_HEADERS ? outer_sum(data, V4_HEADERS, &p, p.ttl) :
		    data + V6_HEADERS > end ? 1 : outer_sum(data, V6_HEADERS, &p, p.ttl))
			return CHECKSUM;
	}
	*to = l;
	*proto = p.proto;
	why = o->bytes == V4_HEADERS ? decapsulate(skb, n, l, &p, V4_HEADERS) : decapsulate(skb, n, l, &p, V6_HEADERS);
	return why == FAST && seen.seal && translate(skb, ETH_HLEN, &p, &key, &seen, IN) ? -1 : why;
}

/* Whether a packet is UDP, or cannot be told yet: most at an uplink are not, and pay no more. */
static __always_inline int may_be_udp(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 *proto = data + OUTER_IP + (skb->protocol == bpf_htons(ETH_P_IP) ? 9 : 6);

	if (skb->protocol != bpf_htons(ETH_P_IP) && skb->protocol != bpf_htons(ETH_P_IPV6))
		return 0;
	return (void *)(proto + 1) > end || *proto == IPPROTO_UDP;
}

SEC("tc")
int fl_ov_receive(struct __sk_buff *skb)
{
	__u32 bytes = skb->len, way, ifindex;
	struct outer o = {};
	struct local *to = 0;
	struct network *n;
	struct note *hand;
	__u8 proto = 0;
	int why;

	if (skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return TCX_NEXT; /* for many, for somebody else, or of a VLAN */
	if (!may_be_udp(skb))
		return TCX_NEXT; /* no tunnel's */
	linear(skb, V4_HEADERS + 28); /* as much as an outer header over IPv6 has, too */
	why = parse_outer(skb, &o);
	if (!o.net)
		return TCX_NEXT; /* no network of ours */
	n = bpf_map_lookup_elem(&fl_ov_nets, &o.net);
	if (!n || !(n->flags & NET_ON))
		return TCX_NEXT; /* nothing is fast now */
	if (why == FAST) {
		/* The inner headers, at least without TCP's options. */
		linear(skb, o.bytes + (o.inner == bpf_htons(ETH_P_IPV6) ? 60 : 40));
		why = receive(skb, n, &o, &to, &proto);
	}
	if (why == -1 || (why == FAST && !to))
		return TCX_DROP; /* half of the headers could be written: cannot be */
	count(o.net, IN, why, bytes - (o.bytes - ETH_HLEN));
	if (why != FAST || !to)
		return TCX_NEXT; /* the slow path decides */
	ifindex = to->ifindex;
	way = to->way;
	passed(to->slot, IN, 0, skb->len);
	skb->mark = 0;
	skb->priority = 0; /* as a tunnel and a veth would leave them */
	if (way & WAY_PEER)
		fl_handed_to(skb, to->tenant, proto);
	if (n->outside) {
		hand = note();
		if (!hand)
			return TCX_DROP; /* cannot be */
		hand->to = ifindex;
		hand->way = way;
		return bpf_redirect_peer(n->outside, 0);
	}
	return way & WAY_PEER ? bpf_redirect_peer(ifindex, 0) : bpf_redirect(ifindex, 0);
}

/* At the other end of the pair: what fl_ov_send, or fl_ov_receive, has made ready. */
SEC("tc")
int fl_ov_pair(struct __sk_buff *skb)
{
	struct note *hand = note();
	__u32 to;

	if (!hand || !hand->to)
		return TCX_DROP; /* nobody else sends here */
	to = hand->to;
	hand->to = 0;
	return hand->way & WAY_PEER ? bpf_redirect_peer(to, 0) : bpf_redirect(to, 0);
}
