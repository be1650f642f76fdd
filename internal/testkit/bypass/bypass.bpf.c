//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * For tests: programs that redirect packets past the stack and past the other programs of
 * this host. They trust every packet.
 */

#include "fate.h"
#include "kernel.h"
#include "parse.h"

#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The host end, for fl_unpack, or the uplink, for fl_send. All are set before loading. */
const volatile __u32 fl_to;
/* The tenant that fl_unpack reports; 0: it reports nothing. */
const volatile __u16 fl_tenant;

/* The headers of VXLAN over IPv4. */
struct tunnel {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__u32 vxlan[2];
} __attribute__((packed));

/* At an uplink, ingress: hands IPv4 in VXLAN over to a container. */
SEC("tc")
int fl_unpack(struct __sk_buff *skb)
{
	struct tunnel out;
	struct ethhdr eth;
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, 0, &out, sizeof(out)) || out.eth.h_proto != bpf_htons(ETH_P_IP) ||
	    out.ip.protocol != IPPROTO_UDP || !fl_vxlan_port(bpf_ntohs(out.udp.dest)))
		return TCX_NEXT;
	if (bpf_skb_load_bytes(skb, sizeof(out), &eth, sizeof(eth)) || eth.h_proto != bpf_htons(ETH_P_IP) ||
	    bpf_skb_load_bytes(skb, sizeof(out) + sizeof(eth), &ip, sizeof(ip)))
		return TCX_NEXT; /* ARP */
	if (bpf_skb_adjust_room(skb, -(__s32)sizeof(out), BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_NO_CSUM_RESET) ||
	    bpf_skb_store_bytes(skb, 0, &eth, sizeof(eth), 0) || bpf_skb_change_type(skb, PACKET_HOST))
		return TCX_DROP;
	if (fl_tenant)
		fl_handed_to(skb, fl_tenant, ip.protocol);
	return bpf_redirect_peer(fl_to, 0);
}

/* At a host end, ingress: sends every packet by an uplink, without a look at it. */
SEC("tc")
int fl_send(struct __sk_buff *skb)
{
	return bpf_redirect(fl_to, 0);
}
