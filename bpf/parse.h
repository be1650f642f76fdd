/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Parses packet headers for all programs. It checks every bound, and distinguishes a
 * truncated or unknown header from one that is present. It does not identify a packet's
 * tenant: see identity.h.
 */
#ifndef FL_PARSE_H
#define FL_PARSE_H

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

/* UDP ports of tunnels. VXLAN has IANA's port and the kernel's original one (Flannel). */
#define FL_PORT_VXLAN 4789
#define FL_PORT_VXLAN_OLD 8472
#define FL_PORT_GENEVE 6081

static __always_inline int fl_vxlan_port(__u16 port)
{
	return port == FL_PORT_VXLAN || port == FL_PORT_VXLAN_OLD;
}

/* Only kernel code gets it from linux/if_vlan.h. */
struct fl_vlan_hdr {
	__u16 h_vlan_TCI;
	__u16 h_vlan_encapsulated_proto;
};

/* An IPv6 address, or an IPv4 address in mapped form. */
struct fl_address {
	__u8 ip[16];
};

/* Reads the destination of the packet at l3, if it is IP. */
static __always_inline int fl_destination(void *l3, void *end, __u16 proto, struct fl_address *to)
{
	if (proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = l3;

		if ((void *)(ip + 1) > end)
			return -1; /* truncated: the receiver drops it */
		to->ip[10] = to->ip[11] = 0xff;
		__builtin_memcpy(&to->ip[12], &ip->daddr, 4);
		return 0;
	}
	if (proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip6 = l3;

		if ((void *)(ip6 + 1) > end)
			return -1; /* truncated */
		if (!ip6->daddr.s6_addr32[0] && !ip6->daddr.s6_addr32[1] &&
		    ip6->daddr.s6_addr32[2] == bpf_htonl(0xffff))
			return -1; /* stands for an IPv4 address here, and is invalid on a wire */
		__builtin_memcpy(to->ip, &ip6->daddr, 16);
		return 0;
	}
	return -1; /* ARP and the like: few, and of no tenant */
}

/* Reads the destination of the frame at data. */
static __always_inline int fl_frame_destination(void *data, void *end, struct fl_address *to)
{
	struct ethhdr *eth = data;

	if (data + sizeof(*eth) > end)
		return -1; /* truncated: no device here accepts it */
	return fl_destination(data + sizeof(*eth), end, eth->h_proto, to);
}

static __always_inline int fl_same_mac(const volatile __u8 *a, const volatile __u8 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] &&
	       a[3] == b[3] && a[4] == b[4] && a[5] == b[5];
}

/* Only kernel code gets them from linux/socket.h. */
#define FL_AF_INET 2
#define FL_AF_INET6 10

static __always_inline __u64 fl_mix(__u64 h, __u64 v)
{
	h = (h ^ v) * 0x9fb21c651e98df25ULL;
	return h ^ h >> 29;
}

/* The headers of one packet, as far as parsed. */
struct fl_headers {
	__u64 flow;
	__u32 l4; /* offset */
	__u32 proto;
	__u32 ports; /* source and destination, in network order */
	__u32 syn;   /* begins a connection */
};

/*
 * Mixes addresses, protocol and ports of the IP packet at off into h->flow. Returns -1
 * for a packet without a flow. A fragment has none: only the first fragment has ports,
 * and many containers can share the addresses (NAT).
 */
static __always_inline int fl_ip_flow(struct __sk_buff *skb, __u32 off, __be16 proto, struct fl_headers *h)
{
	__u8 l4[16] = {};

	if (proto == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)))
			return -1;
		if (ip.frag_off & bpf_htons(0x3fff)) /* IP_MF | IP_OFFSET */
			return -1;
		h->l4 = off + ip.ihl * 4;
		h->proto = ip.protocol;
		h->flow = fl_mix(h->flow, (__u64)ip.saddr << 32 | ip.daddr);
	} else if (proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;
		__u64 a[4];

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)))
			return -1;
		__builtin_memcpy(a, &ip.saddr, sizeof(a));
		h->l4 = off + sizeof(ip);
		h->proto = ip.nexthdr; /* an extension header: no flow */
		h->flow = fl_mix(fl_mix(fl_mix(fl_mix(h->flow, a[0]), a[1]), a[2]), a[3]);
	} else {
		return -1;
	}
	switch (h->proto) {
	case IPPROTO_TCP:
		if (bpf_skb_load_bytes(skb, h->l4, l4, 14))
			return -1;
		h->syn = (l4[13] & 0x12) == 0x02; /* SYN without ACK */
		break;
	case IPPROTO_UDP:
		if (bpf_skb_load_bytes(skb, h->l4, l4, 8))
			return -1;
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if (bpf_skb_load_bytes(skb, h->l4, l4, 8))
			return -1;
		/* Echo request and reply have an id, which replaces the ports. */
		if (h->proto == IPPROTO_ICMP ? l4[0] != 0 && l4[0] != 8 : l4[0] != 128 && l4[0] != 129)
			return -1;
		l4[0] = l4[4];
		l4[1] = l4[5];
		l4[2] = l4[3] = 0;
		break;
	default:
		return -1;
	}
	__builtin_memcpy(&h->ports, l4, sizeof(h->ports));
	h->flow = fl_mix(h->flow, (__u64)h->proto << 32 | h->ports);
	return 0;
}

static __always_inline int fl_is_vxlan(const struct fl_headers *h)
{
	__u32 port = bpf_ntohl(h->ports) & 0xffff;

	return h->proto == IPPROTO_UDP && fl_vxlan_port(port);
}

/*
 * Returns the flow of a packet, in a tunnel that of the inner packet; 0 if it has none.
 * seed is random, so that flows cannot be chosen to collide.
 */
static __always_inline __u64 fl_flow_of(struct __sk_buff *skb, __u64 seed, __u32 *syn)
{
	struct fl_headers out = { .flow = seed }, in = {};
	__u32 vni;
	__be16 proto;

	if (fl_ip_flow(skb, ETH_HLEN, skb->protocol, &out))
		return 0;
	*syn = out.syn;
	if (!fl_is_vxlan(&out))
		return out.flow;
	if (bpf_skb_load_bytes(skb, out.l4 + 8 + 4, &vni, sizeof(vni)) ||
	    bpf_skb_load_bytes(skb, out.l4 + 8 + 8 + 12, &proto, sizeof(proto)))
		return 0;
	in.flow = fl_mix(seed, vni);
	if (fl_ip_flow(skb, out.l4 + 8 + 8 + ETH_HLEN, proto, &in))
		return 0;
	*syn = in.syn;
	return in.flow;
}

#endif
