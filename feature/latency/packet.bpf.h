/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parsing of packets. */

#define VXLAN_INNER (8 + 8) /* the outer UDP header and the VXLAN header */

/*
 * Returns the address of a packet as a number. The verifier forbids arithmetic on a pointer
 * to an skb, but does not track it through a map. Bottom halves are off, so no other packet
 * interferes. On PREEMPT_RT they may be preempted; then the stamp may not be found.
 */
static __always_inline __u64 address(struct cpu *c, const struct sk_buff *skb)
{
	*(const struct sk_buff *volatile *)&c->key = skb;
	return *(volatile __u64 *)&c->key;
}

/* Fields of struct sk_buff that other features do not need. */
struct sk_buff___inner {
	__u16 inner_network_header;
} __kernel_type;

struct skb_shared_info___gso {
	unsigned short gso_size;
	unsigned int gso_type;
} __kernel_type;

struct net_device___gso {
	__u64 features;
} __kernel_type;

/* include/linux/netdev_features.h: the position of the GSO types among the features. */
#define NETIF_F_GSO_SHIFT 16

struct ports {
	__be16 from, to;
	__be32 seq;
};

/*
 * Parses the IP header at an address and the beginning of the header after it. Returns the
 * length of the IP header, 0 if there is none or it cannot be read. Global, like fl_bucket.
 */
__noinline int fl_parse(__u64 address, struct flow *f)
{
	const void *l3 = (const void *)address;
	struct ports l4 = {};
	__u8 version = 0;
	int length;

	if (!f)
		return 0; /* for the verifier */
	if (bpf_probe_read_kernel(&version, 1, l3))
		return 0;
	if (version >> 4 == 4) {
		struct iphdr ip;

		if (bpf_probe_read_kernel(&ip, sizeof(ip), l3))
			return 0;
		length = (version & 15) * 4;
		f->family = 4;
		f->protocol = ip.protocol;
		f->id = ip.id;
		f->len = bpf_ntohs(ip.tot_len);
		__builtin_memcpy(f->from, &ip.saddr, 4);
		__builtin_memcpy(f->to, &ip.daddr, 4);
		if (ip.frag_off & bpf_htons(0x1fff))
			return length; /* only the first fragment has ports */
	} else if (version >> 4 == 6) {
		struct ipv6hdr ip;

		if (bpf_probe_read_kernel(&ip, sizeof(ip), l3))
			return 0;
		length = sizeof(ip);
		f->family = 6;
		f->protocol = ip.nexthdr;
		f->id = 0;
		f->len = ip.payload_len ? sizeof(ip) + bpf_ntohs(ip.payload_len) : 0;
		__builtin_memcpy(f->from, &ip.saddr, 16);
		__builtin_memcpy(f->to, &ip.daddr, 16);
	} else {
		return 0;
	}
	if (bpf_probe_read_kernel(&l4, sizeof(l4), l3 + length))
		return length;
	switch (f->protocol) {
	case IPPROTO_TCP:
		f->seq = bpf_ntohl(l4.seq);
		bpf_probe_read_kernel(&f->flags, 1, l3 + length + 13);
		f->from_port = l4.from;
		f->to_port = l4.to;
		break;
	case IPPROTO_UDP:
		f->from_port = l4.from;
		f->to_port = l4.to;
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		f->seq = bpf_ntohs(l4.from);           /* type and code */
		f->to_port = (__be16)(l4.seq >> 16); /* sequence number of an echo */
		break;
	}
	return length;
}

static __always_inline __u8 class_of(const struct flow *f)
{
	switch (f->protocol) {
	case IPPROTO_TCP:
		return TCP;
	case IPPROTO_UDP:
		return UDP;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return ICMP;
	}
	return OTHER;
}

/*
 * Hashes the fields of a packet that NAT, routers and tunnels leave unchanged; 0 for none.
 * Lengths are left out because GRO changes them.
 */
static __always_inline __u32 check_of(const struct flow *f)
{
	__u32 word = f->seq;

	if (!f->family)
		return 0;
	if (f->protocol == IPPROTO_ICMP || f->protocol == IPPROTO_ICMPV6)
		word = f->seq << 16 | f->to_port;
	return ((word ^ (__u32)f->id << 8 ^ f->protocol) * 0x9e3779b1U) | 1;
}

static __always_inline int tunnelled(const struct flow *f)
{
	__u16 port = bpf_ntohs(f->to_port);

	return f->protocol == IPPROTO_UDP && (fl_vxlan_port(port) || port == FL_PORT_GENEVE);
}

/*
 * Parses a packet that is sent. If it is in a tunnel, the inner packet counts; the kernel
 * keeps its offset in the skb.
 */
static __always_inline int sent_flow(const struct sk_buff *skb, struct flow *f)
{
	__u64 head = 0; /* read by a helper: the verifier of 6.18 does not accept a direct read as a number */
	int length;

	bpf_core_read(&head, sizeof(head), &skb->head);
	length = fl_parse(head + skb->network_header, f);
	if (length && tunnelled(f)) {
		__u16 at = ((const struct sk_buff___inner *)skb)->inner_network_header;
		struct flow inner = {};

		if (at > skb->network_header && fl_parse(head + at, &inner))
			*f = inner;
	}
	return length;
}

/* Parses a packet that is received. The data begins with the network header. */
static __always_inline int received_flow(const struct sk_buff *skb, struct flow *f)
{
	__u64 data = 0; /* as in sent_flow */
	int length;

	bpf_core_read(&data, sizeof(data), &skb->data);
	length = fl_parse(data, f);

	if (length && tunnelled(f) && f->to_port != bpf_htons(FL_PORT_GENEVE)) {
		struct flow inner = {};

		if (fl_parse(data + length + VXLAN_INNER + ETH_HLEN, &inner))
			*f = inner;
	}
	return length;
}

/* Reports whether the kernel is about to segment a packet for the device (net_gso_ok). */
static __always_inline int splits(const struct sk_buff *skb, const struct net_device *dev)
{
	struct skb_shared_info___gso *info;
	__u64 head = 0, type;

	bpf_core_read(&head, sizeof(head), &skb->head);
	info = (void *)(head + skb->end);
	if (!BPF_CORE_READ(info, gso_size))
		return 0;
	type = (__u64)BPF_CORE_READ(info, gso_type) << NETIF_F_GSO_SHIFT;
	return (((const struct net_device___gso *)dev)->features & type) != type;
}

/* Returns the key of the stamp of a packet that is segmented: its first segment has the same. */
static __always_inline __u64 key_of(const struct flow *f)
{
	__u64 ports = (__u64)f->from_port << 16 | f->to_port, addresses;
	__u32 from, to;

	__builtin_memcpy(&from, f->from, sizeof(from));
	__builtin_memcpy(&to, f->to, sizeof(to));
	addresses = (__u64)from << 32 | to;
	return fl_mix(fl_mix(addresses, ports << 32 | f->seq), f->id) | 3; /* no address of an skb */
}
