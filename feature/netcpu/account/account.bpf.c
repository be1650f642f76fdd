//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Charges each nanosecond of network softirq to the tenant that caused it, and
 * notes whose time it was (Iron, section 3.1).
 *
 * A CPU is in one run at a time: from softirq_entry to softirq_exit, or one
 * poll of a NAPI thread. What happens in a run cuts it into intervals, each of
 * which is the work for one packet:
 *
 *   netif_receive_skb   a packet begins. If its device is a tenant's, so is the
 *                       interval. Else the packet is open: nobody's yet.
 *   net_dev_start_xmit  towards a tenant's veth: what is open was for that
 *                       tenant, and it is that tenant's work from here on.
 *   sockets (sock.bpf.h) tell whose an open packet was that no veth tells.
 *   napi_poll           no packet any more.
 *
 * The interrupt out of which a run comes is a part of it if it is a timer's (HTB
 * and TCP set one for each packet that has to wait) or another CPU's call (by which
 * RPS hands packets over): on a virtual machine it takes as long as the packet,
 * mostly where no event is (fl_around, fl_around_call).
 *
 * An open packet that nothing tells of is the system's; but not in a namespace that
 * user space does not know, as a container may have made it to have others pay, or
 * to be given credit: see sends() and leave_open(). Time that lies between
 * packets (driver, GRO, softirq entry and exit, all of a NET_TX run, and of one
 * in which a timer sends) goes into a pot, which is shared evenly over the packets of the run at its end.
 *
 * Of the runs of a busy CPU only some are looked at: sample.bpf.h.
 *
 * Everything is kept in a table per CPU of few entries, one for each pair of
 * victim and culprit and each class of packets, and goes from there into the
 * maps that user space reads when the table is full or old. No map is touched
 * per packet but that table.
 *
 * What a program drops by XDP no event shows. It calls fl_taken, which takes it
 * for a packet that begins.
 *
 * Hooks and cost: README.md. Who reads the maps: account.go. Full maps: fl_thefts:
 * counted in lost; charges go on; those of identity.h: see there. The programs no
 * longer run once the agent has ended.
 */

#include "charges.h"
#include "identity.h"
#include "kernel.h"
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

#include "maps.bpf.h"
#include "device.bpf.h"
#include "table.bpf.h"
#include "pool.bpf.h"
#include "sample.bpf.h"
#include "run.bpf.h"
#include "packet.bpf.h"

/* Whose the copies of fl_stamp and fl_reached are; set before they are loaded. */
const volatile __u32 fl_slot;

/* Whether a copy of fl_taken takes packets of several fragments; likewise. */
const volatile __u8 fl_frags;

#include "sock.bpf.h"

/*
 * ns that a timer's interrupt takes beyond its handler, where no event is:
 * measured, and told by user space (around.go). 0: not known.
 */
__u64 fl_around;
__u64 fl_around_call; /* the same of another CPU's call */

/*
 * An interrupt's softirqs begin right after it, before anything else can run.
 * What begins later has another cause.
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
		return 0; /* cannot be: one entry, index 0 */
	if (c->run)
		end(c, c->last); /* a thread's, see left() */
	now = bpf_ktime_get_ns();
	/*
	 * Of a poll that was not looked at, what GRO held back goes up after
	 * napi_poll, so that nothing has ended it.
	 */
	if (c->skip)
		pass(c, now);
	c->skip = 0;
	if (c->irq_end && now - c->irq_end < FOLLOWS_NS) {
		now = c->irq - (c->call ? fl_around_call : fl_around);
		if ((__s64)(now - c->last) < 0)
			now = c->last; /* until then it was the run before that */
	}
	c->irq_end = 0;
	if (!sampled(c)) {
		c->skip = vec;
		c->skip_at = now;
		c->network = 0;
		return 0; /* another run counts for it */
	}
	begin(c, vec, now);
	return 0;
}

static __always_inline int interrupt_enter(__u64 call)
{
	struct cpu *c = this_cpu();

	if (!c)
		return 0; /* cannot be */
	c->irq_end = 0;
	/* Within a run it is a part of that anyway, looked at or not. */
	c->irq = (c->run && !left(c)) || c->skip ? 0 : bpf_ktime_get_ns();
	c->call = call;
	return 0;
}

static __always_inline int interrupt_exit(void)
{
	struct cpu *c = this_cpu();

	if (!c || !c->irq)
		return 0; /* a part of a run; or we were not attached when it began */
	c->irq_end = bpf_ktime_get_ns();
	return 0;
}

/* These are attached where the architecture has such events. */
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
		return 0; /* cannot be */
	if (c->skip) {
		c->last = bpf_ktime_get_ns(); /* how far back the next may begin, too */
		pass(c, c->last);
		c->skip = 0;
		return 0; /* another run counts for it */
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
		return 0; /* cannot be */
	if (c->skip) {
		c->network = 1;
		return 0; /* another run counts for it */
	}
	if (unseen(c))
		return 0; /* no run, or another one counts for it */
	dev = device(c, skb->dev);
	slot = dev & SLOT;
	if (!slot && further(c, skb))
		return 0;
	comes(c);
	if (slot) {
		__u32 class = dev & HOST_END ? SEND : RECEIVE;

		if (c->kind == KIND_THREAD && !c->victim && class == RECEIVE && !(dev & NESTED))
			c->victim = slot; /* a thread that polls a tenant's own device */
		use(c, slot, class | protocol(skb), 1, skb->len);
		share(c);
		return 0;
	}
	/* On its way through the host after a tenant sent it: see fl_stamp. */
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
		return 0; /* cannot be */
	if (c->skip) {
		c->network = 1;
		return 0; /* another run counts for it */
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
	dev = device(c, to);
	slot = dev & SLOT;
	c->network = 1;
	c->events += c->weight;
	if (!slot) {
		/* A device in a namespace of nobody's tells nothing. */
		if (!(dev & HOST_SIDE) && c->cur != POT)
			return 0;
		if (c->cur == OPEN && defers(to, dev)) {
			c->to_ifb = 1;
			defer(c);
			return 0; /* it comes again, from a tasklet */
		}
		class = SEND;
		/* What is written there in a nested one, nothing has overwritten. */
		slot = dev & NESTED ? 0 : stamped(skb);
		if (!slot && c->cur >= ENTRIES) {
			/* Once an owner is known only a stamp overrules it. */
			slot = of_socket(c, skb->sk);
			packets = slot != 0;
			if (c->cur == OPEN)
				class = RECEIVE; /* it answers what is open */
		}
		if (!slot && c->cur != POT)
			return 0;
		if (!slot && dev & NESTED)
			slot = c->victim; /* see leave_open() */
	} else if (dev & HOST_END) {
		class = RECEIVE;
	} else {
		class = c->cur == OPEN ? RECEIVE : SEND;
		packets = c->cur == OPEN;
	}
	if (c->cur == POT && !slot && defers(to, dev)) {
		defer(c);
		return 0; /* out of the IFB's own queue */
	}
	if (c->cur == POT) {
		/* NET_TX and the like: the run is split over what it sends. */
		struct entry *e = entry(c, slot, class | protocol_sent(skb));

		e->packets += packets * c->weight;
		e->bytes += packets ? skb->len * c->weight : 0;
		e->shares++;
		c->shares++;
		return 0;
	}
	if (c->cur == OPEN) {
		settle(c, slot, class | c->proto, skb, packets);
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
		return 0; /* cannot be */
	if (c->skip == RUN_THREAD) {
		pass(c, bpf_ktime_get_ns());
		c->skip = 0;
	}
	if (left(c))
		end(c, c->last);
	if (!c->run)
		return 0; /* not looked at, or brought nothing, or made by a task */
	if (napi->dev && work)
		c->steered = 1; /* unless something was received */
	/*
	 * While all packets of the run are one owner's, the pot is its, too: then
	 * the clock, which costs most of all, is left alone.
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
 * Run by user space on each CPU before it reads, so that nothing waits in a
 * table. It comes in an interrupt: if that has interrupted a run, the table is
 * the run's, and goes into the maps soon enough.
 */
SEC("raw_tp/softirq_exit")
int fl_flush(void *ctx)
{
	struct cpu *c = this_cpu();

	if (!c || c->run)
		return 0;
	drop_pools(c, bpf_ktime_get_ns());
	flush(c);
	return 0;
}

/*
 * What a tenant sends carries its slot from the host's end of the veth on:
 * tc_index is kept by bridges, routing, NAT and tunnels, and is no one else's
 * on the way. Whatever the tenant has written there itself is overwritten.
 */
SEC("tc")
int fl_stamp(struct __sk_buff *skb)
{
	skb->tc_index = fl_slot;
	return TCX_NEXT; /* let the others see it */
}

/*
 * Called by the program that drops packets by XDP at an uplink, once fl_dropped
 * says on whose account: no event shows that there was a packet. It is like one
 * that is received on a device of the tenant's.
 */
SEC("xdp.frags")
int fl_taken(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	__u32 slot = dropped(), class = OTHER;
	__u64 bytes = end - data;
	struct cpu *c = this_cpu();

	if (!c || c->skip || unseen(c))
		return XDP_DROP; /* another run counts for it */
	/* Behind a VLAN tag it stays OTHER. What is behind the end is our own memory. */
	if (data + sizeof(*eth) + sizeof(struct iphdr) <= end)
		class = protocol_at(data + sizeof(*eth), eth->h_proto);
	if (fl_frags) /* 5.18, as its helper; before, data is all of it */
		bytes = bpf_xdp_get_buff_len(ctx);
	comes(c);
	use(c, slot, RECEIVE | class, 1, bytes);
	share(c);
	return XDP_DROP;
}
