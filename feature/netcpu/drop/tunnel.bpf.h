/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Finds the frame in a packet of a tunnel, before the tunnel's device takes it out. */

#include <linux/udp.h>

/* The first eight bytes of Geneve's header (RFC 8926); VXLAN's is as long. */
struct fl_geneve {
	__u8 options; /* below two bits of the version: their length in words */
	__u8 flags;
	__be16 type;
	__u32 vni;
};

/*
 * Returns the Ethernet header in a packet that is VXLAN or Geneve by its port; NULL for
 * others, for fragments and for what is not in the linear part. It proves nothing, since
 * anybody can send such a packet.
 */
static __always_inline struct ethhdr *tunnelled(void *l3, void *end, __u16 proto)
{
	struct ethhdr *inner;
	struct fl_geneve *g;
	struct udphdr *udp;
	__u16 port;

	if (proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = l3;

		/* IP_MF | IP_OFFSET */
		if ((void *)(ip + 1) > end || ip->ihl != 5 || ip->frag_off & bpf_htons(0x3fff) || ip->protocol != IPPROTO_UDP)
			return NULL;
		udp = (void *)(ip + 1);
	} else if (proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip6 = l3;

		if ((void *)(ip6 + 1) > end || ip6->nexthdr != IPPROTO_UDP)
			return NULL;
		udp = (void *)(ip6 + 1);
	} else {
		return NULL;
	}
	g = (void *)(udp + 1);
	if ((void *)(g + 1) > end)
		return NULL;
	port = bpf_ntohs(udp->dest);
	inner = (void *)(g + 1);
	if (port == FL_PORT_GENEVE) {
		if (g->type != bpf_htons(ETH_P_TEB))
			return NULL; /* no Ethernet in it */
		inner = (void *)inner + (g->options & 0x3f) * 4;
	} else if (!fl_vxlan_port(port)) {
		return NULL;
	}
	return (void *)(inner + 1) > end ? NULL : inner;
}
