/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The work of a CPU while a packet waited for it. Each CPU keeps a ring of its latest work:
 * tasks, softirqs, and single packets in these by their devices. User space attributes tasks
 * and devices to containers.
 *
 * Hooks (tp_btf), attached only while the host is watched: sched_switch, softirq_entry,
 * softirq_exit, netif_receive_skb, net_dev_start_xmit. Cost of an event: a clock and a cache
 * line. A full ring overwrites the oldest entry.
 */

/* Kinds of work. Also waits.go. */
#define DOES_TASK 0    /* who: cgroup v2 id */
#define DOES_IDLE 1
#define DOES_SOFTIRQ 2 /* except for single packets */
#define DOES_PACKET 3  /* who, last: devices */

struct ran {
	__u64 since; /* ns */
	__u64 who;
	__u64 last;
	__u32 kind;
	__u32 pad;
};

#define RANS 32
struct rans {
	__u64 head;
	struct ran ran[RANS];
};

MAP(fl_ran, PERCPU_ARRAY, 1, __u32, struct rans);

/* When the rings began, ns; 0: not kept. */
__u64 fl_ran_since;

/* Shorter waits are ignored. A sender that delivers its packet itself has one, for example. */
#define MIN_WAIT 5000

/* The work of a CPU while a packet waited. It is emitted right before the record, with its parts only. */
#define PARTS RANS
struct part {
	__u64 who;
	__u64 last;
	__u64 ns;
	__u32 kind;
	__u32 pad;
};

struct waited {
	__u64 id; /* of the packet: struct record */
	__u64 ns; /* of the whole wait */
	__u32 stage;
	__u32 parts;
	__u64 reserved;
	struct part part[PARTS];
};
#define WAITED_HEAD 32
_Static_assert(sizeof(struct waited) == WAITED_HEAD + PARTS * sizeof(struct part), "read by waits.go");
_Static_assert(sizeof(struct part) == 32 && sizeof(struct record) % 32 != 0, "distinguished by their lengths");

/*
 * Waits of packets that are under way, by direction. At the uplink the tenant of a packet is
 * not known yet. So its stamp holds a ticket for its wait in this map, and the program that
 * emits the record emits the wait too. KEPT waits later, another wait overwrites it;
 * fl_lost_waits counts overwritten waits of recorded packets.
 */
#define KEPT 512
#define TICKETS 0x40000000
#define TAKEN 1 /* in place of a ticket: a CPU uses the entry */

struct kept {
	__u32 ticket; /* 0: none */
	__u32 pad;
	struct waited waited;
};

MAP(fl_kept, ARRAY, 2 * KEPT, __u32, struct kept);

__u32 fl_tickets[2]; /* tickets given out, by direction */
__u64 fl_lost_waits;

static __always_inline struct kept *kept_at(__u32 direction, __u32 ticket)
{
	__u32 index = (direction & 1) * KEPT + ticket % KEPT;

	return bpf_map_lookup_elem(&fl_kept, &index);
}

/* Keeps the work of this CPU from since to now, while a packet waited. Returns a ticket, or 0. */
__noinline int fl_keep_wait(__u32 direction, __u32 stage, __u64 since, __u64 now)
{
	__u32 zero = 0, n = 0, ticket, old;
	struct rans *r = bpf_map_lookup_elem(&fl_ran, &zero);
	__u64 end = now, from, head;
	struct waited *w;
	struct kept *k;

	ticket = __sync_fetch_and_add(&fl_tickets[direction & 1], 1) % TICKETS + TAKEN + 1;
	k = kept_at(direction, ticket);
	if (!r || !k)
		return 0; /* for the verifier */
	old = *(volatile __u32 *)&k->ticket;
	if (old == TAKEN || !__sync_bool_compare_and_swap(&k->ticket, old, TAKEN))
		return ticket; /* lost; fl_emit_wait counts that */
	w = &k->waited;
	head = r->head;
	for (n = 0; n < PARTS && end > since; n++) {
		struct ran *ran = &r->ran[(head - n) % RANS];

		from = ran->since;
		if (from < fl_ran_since)
			break; /* its end is unknown */
		from = from > since ? from : since;
		w->part[n].who = ran->who;
		w->part[n].last = ran->last;
		w->part[n].ns = end > from ? end - from : 0;
		w->part[n].kind = ran->kind;
		end = end > from ? from : end;
	}
	w->ns = now - since;
	w->stage = stage;
	w->parts = n;
	*(volatile __u32 *)&k->ticket = n ? ticket : 0;
	return n ? ticket : 0;
}

static __always_inline __u32 keep_wait(__u32 direction, __u32 stage, __u64 since, __u64 now)
{
	if (!fl_ran_since || !since || (__s64)(now - since) < MIN_WAIT)
		return 0;
	return fl_keep_wait(direction, stage, since, now);
}

/* Emits the wait with a ticket, as that of the packet with an id. */
__noinline int fl_emit_wait(__u32 direction, __u32 ticket, __u64 id)
{
	struct kept *k = kept_at(direction, ticket);
	__u32 parts;

	if (!k || !__sync_bool_compare_and_swap(&k->ticket, ticket, TAKEN)) {
		increment(&fl_lost_waits);
		return 0;
	}
	parts = k->waited.parts;
	k->waited.id = id;
	if (parts <= PARTS &&
	    bpf_ringbuf_output(&fl_records, &k->waited, WAITED_HEAD + parts * sizeof(struct part), BPF_RB_NO_WAKEUP))
		increment(&fl_lost_waits);
	*(volatile __u32 *)&k->ticket = 0;
	return 0;
}

static __always_inline void emit_wait(__u32 direction, __u32 ticket, __u64 id)
{
	if (ticket)
		fl_emit_wait(direction, ticket, id);
}

/* Records that this CPU begins other work. */
static __always_inline void begins_work(__u32 kind, __u64 who)
{
	__u32 zero = 0;
	struct rans *r = bpf_map_lookup_elem(&fl_ran, &zero);
	struct ran *now, *was;

	if (!r)
		return; /* for the verifier */
	now = &r->ran[r->head % RANS];
	was = &r->ran[(r->head - 1) % RANS];
	if (now->kind == kind && now->who == who && !now->last && kind != DOES_PACKET)
		return;
	/* Equal entries in a row are merged: a flood of packets from one device, for example. */
	if (now->kind != was->kind || now->who != was->who || now->last != was->last || was->since < fl_ran_since)
		r->head++;
	now = &r->ran[r->head % RANS];
	now->since = bpf_ktime_get_ns();
	now->who = who;
	now->last = 0;
	now->kind = kind;
}

/* Records that the current task continues. */
static __always_inline void task_continues(void)
{
	struct task_struct *t = bpf_get_current_task_btf();

	if (t->pid)
		begins_work(DOES_TASK, fl_cgroup_of_task(t));
	else
		begins_work(DOES_IDLE, 0);
}

static __always_inline __u64 name_of(struct net_device *dev)
{
	return (__u64)fl_netns_of(dev) << 32 | (__u32)dev->ifindex;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(fl_ran_switch, _Bool preempt, struct task_struct *prev, struct task_struct *next)
{
	if (next->pid)
		begins_work(DOES_TASK, fl_cgroup_of_task(next));
	else
		begins_work(DOES_IDLE, 0);
	return 0;
}

SEC("tp_btf/softirq_entry")
int BPF_PROG(fl_ran_entry, unsigned int vec)
{
	begins_work(DOES_SOFTIRQ, 0);
	return 0;
}

SEC("tp_btf/softirq_exit")
int BPF_PROG(fl_ran_exit, unsigned int vec)
{
	task_continues();
	return 0;
}

/* Returns the current work if it is on packets: in a softirq, or in a thread that polls. */
static __always_inline struct ran *packet_work(void)
{
	__u32 zero = 0;
	struct rans *r = bpf_map_lookup_elem(&fl_ran, &zero);
	struct ran *now;
	struct task_struct *t;

	if (!r)
		return 0; /* for the verifier */
	now = &r->ran[r->head % RANS];
	if (now->kind == DOES_SOFTIRQ || now->kind == DOES_PACKET)
		return now;
	t = bpf_get_current_task_btf();
	return t->flags & PF_KTHREAD ? now : 0; /* otherwise a task that sends into a tap, for example */
}

SEC("tp_btf/netif_receive_skb")
int BPF_PROG(fl_ran_recv, struct sk_buff *skb)
{
	if (packet_work())
		begins_work(DOES_PACKET, name_of(skb->dev));
	return 0;
}

/* The device that a packet is sent to may identify its container if the one it came from does not. */
SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(fl_ran_xmit, struct sk_buff *skb, struct net_device *dev)
{
	struct ran *now = packet_work();

	if (now && now->kind == DOES_PACKET)
		now->last = name_of(dev);
	return 0;
}
