/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The headers in front of a tunnel's packet: how they are filled in, and compared. */

/* Offsets in the headers that are learnt. */
#define OUTER_IP ETH_HLEN
#define INNER_ETH(bytes) ((bytes) - ETH_HLEN)

/* Reads the inner IP packet behind the headers of a tunnel's packet. */
static __always_inline enum reason parse_inner(struct __sk_buff *skb, __u32 bytes, __be16 type, struct packet *p)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (bytes == V4_HEADERS)
		return data + V4_HEADERS > end ? CUT : parse(data + V4_HEADERS, end, type, p);
	return data + V6_HEADERS > end ? CUT : parse(data + V6_HEADERS, end, type, p);
}

/* The checksum of the outer UDP header that stands in h, where it has 0 or the right one. */
static __always_inline __u16 outer_sum(const __u8 *h, __u32 bytes, const struct packet *p, __u8 ttl)
{
	const struct udp *udp = (void *)(h + bytes - ETH_HLEN - 8 - sizeof(*udp));
	__u32 sum = packet_sum(p, ttl) + bpf_htons(IPPROTO_UDP) + udp->length;

	sum += bytes == V4_HEADERS ? sum_of(h + OUTER_IP + 12, 19) : sum_of(h + OUTER_IP + 8, 31);
	return ~fold(sum);
}

/*
 * Writes what of the headers depends on the packet, as vxlan_xmit would. h has bytes bytes,
 * and is followed by an IP packet of p->length.
 */
static __always_inline void fill(__u8 *h, __u32 bytes, struct network *n, const struct packet *p, __u32 hash, int summed)
{
	__u8 ttl = n->flags & NET_ROUTED ? p->ttl - 1 : p->ttl;
	__u32 inside = p->length + ETH_HLEN + 8; /* tunnel header */
	__u8 ecn = (p->tos & 3) == 3 ? 2 : p->tos & 3;
	struct udp *udp = (void *)(h + bytes - ETH_HLEN - 8 - sizeof(*udp));

	hash ^= hash << 16;
	udp->source = bpf_htons((((__u64)hash * (n->high - n->low)) >> 32) + n->low);
	udp->length = bpf_htons(inside + sizeof(*udp));
	udp->check = 0;
	if (bytes == V4_HEADERS) {
		struct iphdr *ip = (void *)(h + OUTER_IP);

		ip->tos = (n->flags & NET_TOS ? p->tos & ~3 : ip->tos & ~3) | ecn;
		ip->tot_len = bpf_htons(inside + sizeof(*udp) + sizeof(*ip));
		ip->id = bpf_get_prandom_u32();
		ip->check = 0;
		ip->check = ~fold(sum_of(ip, 10));
	} else {
		struct ipv6hdr *ip = (void *)(h + OUTER_IP);
		__u8 tos = (n->flags & NET_TOS ? p->tos : ip->priority << 4 | ip->flow_lbl[0] >> 4) & ~3;

		tos |= ecn;
		ip->priority = tos >> 4;
		ip->flow_lbl[0] = (ip->flow_lbl[0] & 0xf) | tos << 4;
		ip->payload_len = bpf_htons(inside + sizeof(*udp));
	}
	if (summed)
		udp->check = outer_sum(h, bytes, p, ttl) ?: 0xffff;
}

/* Whether each packet that this is sent as fits into the tunnel and onto the uplink. */
static __always_inline int fits(struct __sk_buff *skb, struct network *n, struct remote *r, const struct packet *p)
{
	__u32 length = skb->gso_size ? p->headers + skb->gso_size : p->length;

	return length <= n->mtu && length + r->bytes - ETH_HLEN <= r->mtu;
}

#define ENCAPSULATE(l3)                                                                    \
	(BPF_F_ADJ_ROOM_FIXED_GSO | (l3) | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |                   \
	 BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH)

/* Whether the headers are those of a tunnel's packet, with this inner packet. */
static __always_inline int noted(const __u8 *h, __u32 bytes, struct network *n)
{
	const struct udp *udp = (void *)(h + bytes - ETH_HLEN - 8 - sizeof(*udp));
	const __u32 *words = (void *)(h + bytes - ETH_HLEN - 8);

	if (bytes == V4_HEADERS) {
		const struct iphdr *ip = (void *)(h + OUTER_IP);

		if (*(__u8 *)ip != 0x45 || ip->protocol != IPPROTO_UDP || ip->frag_off & bpf_htons(0x3fff))
			return 0;
	} else {
		const struct ipv6hdr *ip = (void *)(h + OUTER_IP);

		if (ip->version != 6 || ip->nexthdr != IPPROTO_UDP)
			return 0;
	}
	return udp->dest == n->port && words[0] == n->word && words[1] == n->vni;
}

/*
 * Whether learnt headers are those of another packet. Lengths, id, checksum, ECN and source
 * port differ from packet to packet, and the inner source address in a bridged network.
 */
static __always_inline int same_v4(const __u8 *a, const __u8 *b)
{
	return same(a, b, OUTER_IP) && a[OUTER_IP] == b[OUTER_IP] && !((a[OUTER_IP + 1] ^ b[OUTER_IP + 1]) & ~3) &&
	       same(a + OUTER_IP + 6, b + OUTER_IP + 6, 4) && same(a + OUTER_IP + 12, b + OUTER_IP + 12, 8) &&
	       same(a + INNER_ETH(V4_HEADERS), b + INNER_ETH(V4_HEADERS), 6);
}

static __always_inline int same_v6(const __u8 *a, const __u8 *b)
{
	return same(a, b, OUTER_IP) && a[OUTER_IP] == b[OUTER_IP] && !((a[OUTER_IP + 1] ^ b[OUTER_IP + 1]) & ~0x30) &&
	       same(a + OUTER_IP + 2, b + OUTER_IP + 2, 2) && same(a + OUTER_IP + 6, b + OUTER_IP + 6, 34) &&
	       same(a + INNER_ETH(V6_HEADERS), b + INNER_ETH(V6_HEADERS), 6);
}
