//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Charges each nanosecond of network softirq to the tenant that caused it, and records
 * which context lost that time (Iron, section 3.1).
 *
 * A CPU is in one run at a time: a softirq from softirq_entry to softirq_exit, or one
 * poll of a NAPI thread. Events cut a run into intervals. Each interval is the work for
 * one packet:
 *
 *   netif_receive_skb   a packet begins. If its device belongs to a tenant, the
 *                       interval does, too. Otherwise the packet is open: its
 *                       owner is not known yet.
 *   net_dev_start_xmit  to a tenant's veth: the open packet belongs to that
 *                       tenant, and so does the work from here on.
 *   sockets             identify the owner where no veth does (sock.bpf.h).
 *   fate.h              a program that drops the open packet, or redirects it into
 *                       a container, reports its owner.
 *   napi_poll           the last packet ends.
 *
 * A run includes the interrupt that raised its softirq if that is a timer interrupt (HTB
 * and TCP set a timer for each packet that has to wait) or a function call from another
 * CPU (RPS hands packets over by it). On a virtual machine the interrupt takes as long as
 * the packet, and most of that time is outside of all tracepoints (fl_around,
 * fl_around_call).
 *
 * The system pays for an open packet if its owner stays unknown. A namespace that user
 * space does not know is an exception, because a container may have made it to make
 * others pay, or to get credit: see sends() and leave_open(). The time between packets
 * goes into a pot: driver, GRO, softirq entry and exit, and all of a NET_TX run or a run
 * in which a timer sends. At the end of the run its packets share the pot evenly.
 *
 * On a busy CPU the programs sample runs: sample.bpf.h.
 *
 * Each CPU has a small table, with an entry for each victim, culprit and class of
 * packets. The programs touch no other map per packet. They add the table to the maps
 * that user space reads when it is full or old.
 *
 * No tracepoint shows a packet that an XDP program drops. That program calls fl_taken,
 * which begins a packet.
 *
 * Cost: docs/measured.md. Reader of the maps: account.go. When fl_thefts is full, lost
 * counts the charges without a theft, and charging continues. For the maps of identity.h
 * see there. The programs end with the agent.
 */

#include "charges.h"
#include "fate.h"
#include "identity.h"
#include "kernel.h"
#include "map.h"
#include "parse.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* The device that received a packet; 0: it was made here. */
struct sk_buff___in {
	int skb_iif;
} __attribute__((preserve_access_index));

#include "maps.bpf.h"
#include "device.bpf.h"
#include "table.bpf.h"
#include "pool.bpf.h"
#include "sample.bpf.h"
#include "run.bpf.h"
#include "packet.bpf.h"

/* The owner of a copy of fl_reached, or its number in a copy of fl_stamp. */
volatile __u32 fl_slot SEC(".data.copy");
volatile __u16 fl_number SEC(".data.copy");

#include "sock.bpf.h"

/*
 * The time in ns that a timer interrupt takes outside of its handler, where there is
 * no tracepoint. User space measures it (around.go). 0: not known.
 */
__u64 fl_around;
__u64 fl_around_call; /* the same for a function call from another CPU */

/*
 * The softirqs that an interrupt raises begin right after it, before anything else
 * can run. A softirq that begins later has another cause.
 */
#define FOLLOWS_NS 2000

SEC("tp_btf/softirq_entry")
int BPF_PROG(fl_enter, unsigned int vec)
{
	struct cpu *c;
	__u64 now;

	if (!may_be_network(vec))
		return 0;
	c = this_cpu();
	if (!c)
		return 0; /* impossible: one entry, index 0 */
	if (fl_bare && !chosen(c, fl_bare))
		return 0; /* another softirq stands for it */
	if (c->run)
		end(c, c->last); /* the run of a thread, see left() */
	now = bpf_ktime_get_ns();
	/*
	 * After a poll that was not sampled, GRO passes on the packets that it held
	 * back. That happens after napi_poll, so no event ended the run.
	 */
	if (c->skip)
		pass(c, now);
	c->before = 0;
	if (c->irq_end && now - c->irq_end < FOLLOWS_NS) {
		__u64 from = c->irq - (c->call ? fl_around_call : fl_around);

		if ((__s64)(from - c->last) < 0)
			from = c->last; /* the time before belongs to the last run */
		c->before = now - from;
		now = from;
	}
	c->irq_end = 0;
	if (fl_bare || !sampled(c)) {
		c->skip = vec;
		c->skip_at = now;
		c->network = 0;
		return 0; /* not sampled: another run stands for it */
	}
	begin(c, vec, now);
	return 0;
}

static __always_inline int interrupt_enter(__u64 call)
{
	struct cpu *c = this_cpu();

	if (!c)
		return 0; /* impossible */
	c->irq_end = 0;
	/* Within a run it is a part of that run already, sampled or not. */
	c->irq = (c->run && !left(c)) || c->skip ? 0 : bpf_ktime_get_ns();
	c->call = call;
	return 0;
}

static __always_inline int interrupt_exit(void)
{
	struct cpu *c = this_cpu();

	if (!c || !c->irq)
		return 0; /* a part of a run, or it began before we were attached */
	c->irq_end = bpf_ktime_get_ns();
	return 0;
}

/* User space attaches these where the architecture has the tracepoints. */
SEC("tp_btf/local_timer_entry")
int BPF_PROG(fl_timer, int vector)
{
	return interrupt_enter(0);
}

SEC("tp_btf/local_timer_exit")
int BPF_PROG(fl_timed, int vector)
{
	return interrupt_exit();
}

SEC("tp_btf/call_function_single_entry")
int BPF_PROG(fl_call, int vector)
{
	return interrupt_enter(1);
}

SEC("tp_btf/call_function_single_exit")
int BPF_PROG(fl_called, int vector)
{
	return interrupt_exit();
}

SEC("tp_btf/softirq_exit")
int BPF_PROG(fl_exit, unsigned int vec)
{
	struct cpu *c;

	if (!may_be_network(vec))
		return 0;
	c = this_cpu();
	if (!c)
		return 0; /* impossible */
	if (c->skip) {
		c->last = bpf_ktime_get_ns(); /* the next run begins no earlier */
		pass(c, c->last);
		return 0; /* not sampled: another run stands for it */
	}
	if (c->run != vec)
		return 0; /* it began before we were attached */
	end(c, bpf_ktime_get_ns());
	return 0;
}

SEC("tp_btf/netif_receive_skb")
int BPF_PROG(fl_receive, struct sk_buff *skb)
{
	struct cpu *c = this_cpu();
	__u32 dev, slot;

	if (!c)
		return 0; /* impossible */
	if (c->skip) {
		c->network = 1;
		return 0; /* not sampled: another run stands for it */
	}
	if (unseen(c))
		return 0; /* in no run, or in one that is not sampled */
	dev = device(c, skb->dev);
	slot = dev & SLOT;
	if (!slot && further(c, skb))
		return 0;
	comes(c);
	if (slot) {
		__u32 class = dev & HOST_END ? SEND : RECEIVE;

		if (c->kind == KIND_THREAD && !c->victim && class == RECEIVE && !(dev & NESTED))
			c->victim = slot; /* the thread polls a device of the tenant */
		if (class == RECEIVE)
			peers(c, skb, slot);
		share(c, use(c, slot, class | protocol(skb), 1, skb->len));
		c->skb = (__u64)skb;
		c->sender = class == SEND ? slot : 0;
		c->netns = fl_netns_of(skb->dev);
		c->ifindex = skb->dev->ifindex;
		return 0;
	}
	/* The host forwards a packet that a tenant sent: see fl_stamp. */
	slot = dev & HOST_SIDE ? stamped(skb) : 0;
	if (slot) {
		use(c, slot, SEND | protocol(skb), 0, 0);
		return 0;
	}
	open(c, skb, dev);
	return 0;
}

SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(fl_xmit, struct sk_buff *skb, struct net_device *to)
{
	struct cpu *c = this_cpu();
	__u32 dev, slot, class, packets = 0;

	if (!c)
		return 0; /* impossible */
	if (c->skip) {
		c->network = 1;
		return 0; /* not sampled: another run stands for it */
	}
	if (left(c))
		end(c, c->last);
	if (c->run != NET_RX_SOFTIRQ) {
		c->sent_netns = fl_netns_of(to);
		c->sent_ifindex = to->ifindex;
	}
	if (!c->run) {
		sends(c, skb, to);
		return 0; /* a task sends: the scheduler charges it */
	}
	if (c->cur == OPEN)
		told(c); /* the receiving container replies */
	dev = device(c, to);
	slot = dev & SLOT;
	c->network = 1;
	c->events += c->weight;
	if (c->cur == POT && dev & HOST_SIDE && !slot && ((struct sk_buff___in *)skb)->skb_iif)
		c->later++;
	if (!slot) {
		/* A device in a namespace without a tenant identifies no owner. */
		if (!(dev & HOST_SIDE) && c->cur != POT)
			return 0;
		if (c->cur == OPEN && defers(to, dev)) {
			c->to_ifb = 1;
			defer(c);
			return 0; /* the IFB's tasklet receives it again */
		}
		class = SEND;
		/* In a nested namespace a container may have written the stamp. */
		slot = dev & NESTED ? 0 : stamped(skb);
		if (!slot && c->cur >= ENTRIES) {
			/* Only a stamp overrules an owner that is known already. */
			slot = of_socket(c, skb->sk);
			packets = slot != 0;
			if (c->cur == OPEN)
				class = RECEIVE; /* the socket answers the open packet */
		}
		if (!slot && c->cur != POT)
			return 0;
		if (!slot && dev & NESTED)
			slot = c->victim; /* see leave_open() */
	} else if (dev & HOST_END) {
		class = RECEIVE;
		peers(c, skb, slot);
	} else {
		class = c->cur == OPEN ? RECEIVE : SEND;
		packets = c->cur == OPEN;
	}
	if (c->cur == POT && !slot && defers(to, dev)) {
		defer(c);
		return 0; /* it waited in the IFB's own queue */
	}
	if (c->cur == POT) {
		/* NET_TX and the like: the packets that the run sends share it. */
		struct entry *e = entry(c, slot, class | protocol_sent(skb));

		e->packets += packets * c->weight;
		e->bytes += packets ? skb->len * c->weight : 0;
		share(c, e);
		return 0;
	}
	if (c->cur == OPEN) {
		settle(c, slot, class | c->proto, (__u64)skb, packets);
		return 0;
	}
	if (slot == c->owner)
		return 0; /* an acknowledgement, a reply, one step further */
	close(c, bpf_ktime_get_ns());
	use(c, slot, class | protocol_sent(skb), 0, 0);
	return 0;
}

SEC("tp_btf/napi_poll")
int BPF_PROG(fl_polled, struct napi_struct *napi, int work, int budget)
{
	struct cpu *c = this_cpu();
	__u64 now;

	if (!c)
		return 0; /* impossible */
	if (c->skip == RUN_THREAD)
		pass(c, bpf_ktime_get_ns());
	if (left(c))
		end(c, c->last);
	if (!c->run)
		return 0; /* not sampled, or no packet, or polled by a task */
	if (napi->dev && work)
		c->steered = 1; /* counts only if this run receives nothing */
	/*
	 * While all packets of the run have one owner, the pot belongs to it, too. The
	 * program then skips the clock, its most expensive step.
	 */
	if (c->cur < ENTRIES && c->run != RUN_THREAD && !c->in_ring &&
	    c->entries[c->cur & (ENTRIES - 1)].shares == c->shares)
		return 0;
	now = bpf_ktime_get_ns();
	close(c, now);
	drop_ring(c);
	c->cur = POT;
	if (c->run == RUN_THREAD)
		end(c, now);
	return 0;
}

/*
 * User space runs this on each CPU before it reads, so that no table holds anything
 * back. It runs in an interrupt, or in a task on its own CPU. A run that it interrupts owns
 * the table, and adds it to the maps soon. After a window (fl_bare) the other programs are
 * detached, and no event ends a run that is still open.
 */

SEC("raw_tp/softirq_exit")
int fl_flush(void *ctx)
{
	struct cpu *c = this_cpu();

	if (!c)
		return 0;
	if (fl_bare)
		c->irq = 0;
	else if (c->run)
		return 0;
	if (c->run)
		end(c, c->last);
	drop_pools(c, bpf_ktime_get_ns());
	flush(c);
	return 0;
}

/*
 * Each packet that a tenant sends carries its number from the host end of the veth on.
 * Bridges, routing, NAT and tunnels keep tc_index, and nothing else on the way uses
 * it. The program overwrites what the tenant itself wrote there.
 */
SEC("tc")
int fl_stamp(struct __sk_buff *skb)
{
	skb->tc_index = fl_number;
	return TCX_NEXT; /* the other programs run, too */
}

/*
 * The program that drops packets by XDP at an uplink calls this, after it has reported
 * the tenant (fate.h). No tracepoint shows such a packet. It counts like one that a
 * device of the tenant receives.
 */
SEC("xdp.frags")
int fl_taken(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	__u32 slot = of_tenant(fl_take_fate().tenant), class = OTHER;
	struct cpu *c = this_cpu();

	if (!c || c->skip || unseen(c))
		return XDP_DROP; /* in no run, or in one that is not sampled */
	/* A packet with a VLAN tag stays OTHER. */
	if (data + sizeof(*eth) + sizeof(struct iphdr) <= end)
		class = protocol_at(data + sizeof(*eth), eth->h_proto);
	comes(c);
	share(c, use(c, slot, RECEIVE | class, 1, bpf_xdp_get_buff_len(ctx)));
	c->own = 0; /* the other programs do not see it */
	return XDP_DROP;
}
