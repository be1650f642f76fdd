/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What overlay.bpf.c has to know of a packet. Each bound is checked here. */

struct packet {
	struct fl_address src;
	struct fl_address dst;
	__u16 sport; /* network order */
	__u16 dport;
	__u16 length;  /* of the IP packet, its header included */
	__u16 headers; /* of IP and transport */
	__u8 proto;
	__u8 tos;
	__u8 ttl;
	__u8 tcp;	/* flags */
	__u8 unsummed;	/* UDP without a checksum */
	__u8 v6;
	__be32 first;	/* word of an IPv6 header */
	__u32 seq;	/* of TCP */
};

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

struct tcp {
	__be16 source, dest;
	__be32 seq, ack;
	__u8 offset;
	__u8 flags;
	__be16 window, check, urgent;
};

struct udp {
	__be16 source, dest, length, check;
};

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return sum + (sum >> 16);
}

static __always_inline __u32 sum_of(const void *words, int n)
{
	const __u16 *w = words;
	__u32 sum = 0;

#pragma unroll
	for (int i = 0; i < n; i++)
		sum += w[i];
	return sum;
}

/* Reads the IP packet at l3. Returns FAST, or why it is none for the fast path. */
static __always_inline enum reason parse(void *l3, void *end, __be16 type, struct packet *p)
{
	void *l4;

	if (type == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = l3;

		if ((void *)(ip + 1) > end)
			return CUT;
		if (*(__u8 *)ip != 0x45)
			return OPTIONS;
		if (ip->frag_off & bpf_htons(0x3fff)) /* IP_MF | IP_OFFSET */
			return FRAGMENT;
		if (fold(sum_of(ip, 10)) != 0xffff)
			return CHECKSUM; /* a router drops it */
		p->v6 = 0;
		p->src.ip[10] = p->src.ip[11] = p->dst.ip[10] = p->dst.ip[11] = 0xff;
		__builtin_memcpy(&p->src.ip[12], &ip->saddr, 4);
		__builtin_memcpy(&p->dst.ip[12], &ip->daddr, 4);
		p->proto = ip->protocol;
		p->tos = ip->tos;
		p->ttl = ip->ttl;
		p->length = bpf_ntohs(ip->tot_len);
		p->headers = sizeof(*ip);
		l4 = ip + 1;
	} else if (type == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = l3;

		if ((void *)(ip + 1) > end)
			return CUT;
		if (ip->version != 6 || (!ip->saddr.s6_addr32[0] && !ip->saddr.s6_addr32[1]) ||
		    (!ip->daddr.s6_addr32[0] && !ip->daddr.s6_addr32[1]))
			return PROTOCOL; /* mapped, or of no global scope */
		p->v6 = 1;
		p->first = *(__be32 *)ip;
		__builtin_memcpy(&p->src, &ip->saddr, 16);
		__builtin_memcpy(&p->dst, &ip->daddr, 16);
		p->proto = ip->nexthdr; /* with extension headers: neither TCP nor UDP */
		p->tos = ip->priority << 4 | ip->flow_lbl[0] >> 4;
		p->ttl = ip->hop_limit;
		p->length = bpf_ntohs(ip->payload_len) + sizeof(*ip);
		p->headers = sizeof(*ip);
		l4 = ip + 1;
	} else {
		return PROTOCOL;
	}
	if (p->proto == IPPROTO_TCP) {
		struct tcp *tcp = l4;

		if ((void *)(tcp + 1) > end)
			return CUT;
		p->sport = tcp->source;
		p->dport = tcp->dest;
		p->tcp = tcp->flags;
		p->seq = bpf_ntohl(tcp->seq);
		p->headers += (tcp->offset >> 4) * 4;
		if (tcp->offset < 0x50 || p->headers > p->length)
			return CUT;
		return FAST;
	}
	if (p->proto == IPPROTO_UDP) {
		struct udp *udp = l4;

		if ((void *)(udp + 1) > end)
			return CUT;
		p->unsummed = !udp->check;
		p->sport = udp->source;
		p->dport = udp->dest;
		p->headers += sizeof(*udp);
		if (p->headers > p->length || bpf_ntohs(udp->length) + p->headers - sizeof(*udp) != p->length)
			return CUT; /* conntrack calls most of them invalid */
		return FAST;
	}
	return p->proto == IPPROTO_FRAGMENT ? FRAGMENT : PROTOCOL;
}

/* Whether a TCP segment is of the middle of a connection. conntrack calls one without ACK invalid. */
static __always_inline int midway(const struct packet *p)
{
	return (p->tcp & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) == TCP_ACK;
}

/* Has the first bytes of a packet in one piece, as far as there are so many. */
static __always_inline void linear(struct __sk_buff *skb, __u32 bytes)
{
	long have = (void *)(long)skb->data_end - (void *)(long)skb->data;

	if (have < bytes && have < skb->len)
		bpf_skb_pull_data(skb, skb->len < bytes ? skb->len : bytes);
}

/* Reads the frame of a packet. */
static __always_inline enum reason parse_frame(struct __sk_buff *skb, struct packet *p)
{
	void *end;
	struct ethhdr *eth;

	linear(skb, ETH_HLEN + (skb->protocol == bpf_htons(ETH_P_IPV6) ? 60 : 40));
	eth = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (skb->vlan_present)
		return PROTOCOL; /* it would take its tag along */
	if ((void *)(eth + 1) > end)
		return CUT;
	return parse(eth + 1, end, eth->h_proto, p);
}

/* Whether n bytes are the same; n is even, and known when this is compiled. */
static __always_inline int same(const void *a, const void *b, int n)
{
	const __u16 *x = a, *y = b;
	__u32 diff = 0;

#pragma unroll
	for (int i = 0; i < n / 2; i++)
		diff |= x[i] ^ y[i];
	return !diff;
}

static __always_inline int same_ip(const struct fl_address *a, const struct fl_address *b)
{
	const __u32 *x = (void *)a, *y = (void *)b;

	return x[3] == y[3] && x[2] == y[2] && x[1] == y[1] && x[0] == y[0];
}

/*
 * The sum of all of an IP packet, folded or not, as its checksums have it: that of the
 * transport makes its part known, and that of IPv4 the header's (local checksum offload,
 * Documentation/networking/checksum-offloads.rst). Who has wrong checksums gets one more.
 */
static __always_inline __u32 packet_sum(const struct packet *p, __u8 ttl)
{
	const __u16 *s = (void *)&p->src, *d = (void *)&p->dst;
	__u32 sum;

	if (p->v6)
		return (p->first & 0xffff) + (p->first >> 16) +
		       bpf_htons((__u16)p->proto << 8 | ttl) + (0xffff & ~bpf_htons(p->proto));
	sum = (__u32)s[6] + s[7] + d[6] + d[7] + bpf_htons(p->proto) + bpf_htons(p->length - sizeof(struct iphdr));
	sum = (sum & 0xffff) + (sum >> 16);
	return 0xffff & ~((sum & 0xffff) + (sum >> 16));
}

/* One hop less to go, as a router does. Reports whether the header was there. */
static __always_inline int hop(struct __sk_buff *skb, __u64 off, __u32 v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	asm volatile("%0 &= 127" : "+r"(off)); /* a bound that Linux 6.1 sees */
	if (v6) {
		struct ipv6hdr *ip = data + off;

		if ((void *)(ip + 1) > end)
			return 0;
		ip->hop_limit--;
		bpf_csum_update(skb, ~(__u32)bpf_htons(1)); /* where the NIC has summed all of it */
	} else {
		struct iphdr *ip = data + off;
		__u32 sum;

		if ((void *)(ip + 1) > end)
			return 0;
		ip->ttl--;
		sum = (__u32)ip->check + bpf_htons(0x0100);
		ip->check = sum + (sum >= 0xffff);
	}
	return 1;
}

/*
 * Makes the other end of the packet at l3 another, as NAT does: wrong checksums stay wrong. Reports an
 * error, after which the packet is beyond repair.
 */
static __always_inline int translate(struct __sk_buff *skb, __u32 l3, const struct packet *p, const struct flow_key *key,
				     const struct side *to, enum direction dir)
{
	__u32 at = l3 + (p->v6 ? dir == OUT ? 24 : 8 : dir == OUT ? 16 : 12);
	__u32 l4 = l3 + (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	__u32 sum = l4 + (p->proto == IPPROTO_TCP ? offsetof(struct tcp, check) : offsetof(struct udp, check));
	__u64 udp = p->proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 *a = (void *)&key->remote, *b = (void *)&to->ip;
	int err = 0;

#pragma unroll
	for (int i = 0; i < 4; i++)
		if (a[i] != b[i])
			err |= bpf_l4_csum_replace(skb, sum, a[i], b[i], udp | BPF_F_PSEUDO_HDR | 4);
	if (p->v6) {
		err |= bpf_skb_store_bytes(skb, at, b, 16, 0);
		/* Where the NIC has summed all of it: to the helper the header has a sum, as IPv4's. */
		bpf_csum_update(skb, bpf_csum_diff(a, 16, b, 16, 0));
	} else {
		err |= bpf_l3_csum_replace(skb, l3 + offsetof(struct iphdr, check), a[3], b[3], 4);
		err |= bpf_skb_store_bytes(skb, at, b + 3, 4, 0);
	}
	err |= bpf_l4_csum_replace(skb, sum, key->rport, to->port, udp | 2);
	return err | bpf_skb_store_bytes(skb, l4 + (dir == OUT ? 2 : 0), &to->port, 2, 0);
}
