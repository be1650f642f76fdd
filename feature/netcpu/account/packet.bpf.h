/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The owner and the class of a packet, and the victim of a run. */

/* The slot of the tenant that fl_stamp wrote a number for into a packet. */
static __always_inline __u32 stamped(struct sk_buff *skb)
{
	__u32 number = skb->tc_index, *slot;

	if (!number)
		return 0;
	slot = bpf_map_lookup_elem(&fl_stamps, &number);
	return slot ? *slot : 0;
}

/*
 * The slot of a task. Tasks of one cgroup share a css_set, so the result is cached
 * by that, and the cgroup need not be read for each run.
 */
static __always_inline __u32 of_task(struct cpu *c, struct task_struct *t)
{
	struct css_set *set = t->cgroups;

	if (c->set != (__u64)set) {
		c->set_slot = of_cgroup(fl_cgroup_of_task(t));
		c->set = (__u64)set;
	}
	return c->set_slot;
}

/* The slot that a socket belongs to: by its namespace, else by its cgroup. */
static __noinline __u32 of_socket(struct cpu *c, struct sock *sk)
{
	__u32 dev;

	if (!fl_full_sock(sk))
		return 0;
	dev = device_at(c, fl_netns_of_sock(sk), 0);
	if (dev & SLOT && !(dev & HOST_END))
		return dev & SLOT;
	return of_cgroup(fl_cgroup_of_sock(sk));
}

/*
 * Notes whether the victim of the run sent a packet for slot: a client that receives its
 * own request in its own time. The receiver still pays, but the time is no theft. For the
 * rest of this run the same holds for all of slot's packets, as they answer.
 */
static __always_inline void peers(struct cpu *c, struct sk_buff *skb, __u32 slot)
{
	__u32 sender;

	if (c->kind != KIND_TASK || c->peer == slot)
		return;
	sender = stamped(skb);
	if (!sender && c->skb == (__u64)skb)
		sender = c->sender; /* in windows there are no stamps */
	if (sender ? sender == c->victim : skb->sk && of_socket(c, skb->sk) == c->victim)
		c->peer = slot;
}

/* Levels of cgroups that are examined. A deeper cgroup still belongs to its tenant. */
#define LEVELS 16

/* The cgroup of the tenant that the current task belongs to. */
__noinline __u64 tenant_of_task(void)
{
	__u64 id, tenant = 0;
	int level;

	for (level = 1; level <= LEVELS; level++) {
		id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			break;
		if (of_cgroup(id))
			tenant = id;
	}
	return tenant;
}

/*
 * A task sends a packet. If user space does not know the namespace, the packets that
 * it receives from here on belong to the task's tenant, on any CPU. Two kinds of
 * packets do not count: those from a device above, such as a macvlan, which were
 * sent in another namespace, and those of a kernel thread (neighbour discovery).
 */
static __always_inline void sends(struct cpu *c, struct sk_buff *skb, struct net_device *to)
{
	struct task_struct *t = (void *)bpf_get_current_task_btf();
	__u32 netns = fl_netns_of(to);
	__u32 dev = device_at(c, netns, to->ifindex);
	struct sock *sk = skb->sk;
	struct fl_nested *known, now = {};

	if (dev && !(dev & NESTED))
		return;
	if (t->flags & PF_KTHREAD || !sk || fl_netns_of_sock(sk) != netns)
		return;
	now.cgroup = fl_cgroup_of_task(t);
	now.epoch = fl_epoch;
	known = bpf_map_lookup_elem(&fl_nested, &netns);
	if (known && known->cgroup == now.cgroup && known->epoch == now.epoch)
		return;
	now.tenant = tenant_of_task();
	bpf_map_update_elem(&fl_nested, &netns, &now, BPF_ANY); /* if full, it stays unknown */
}

#define NAPI_AT(t, i)                                                                  \
	((t)->comm[i] == 'n' && (t)->comm[i + 1] == 'a' && (t)->comm[i + 2] == 'p' &&  \
	 (t)->comm[i + 3] == 'i' && (t)->comm[i + 4] == '/')

/*
 * Whether the current task is a NAPI thread: of a device, or of a CPU, which takes the place of
 * the softirq for packets without a NAPI of their own (thread_backlog_napi, since 6.10).
 */
static __always_inline int napi_thread(void)
{
	struct task_struct *t = (void *)bpf_get_current_task_btf();

	if (!(t->flags & PF_KTHREAD))
		return 0;
	return NAPI_AT(t, 0) || (t->comm[0] == 'b' && t->comm[7] == '_' && NAPI_AT(t, 8)); /* backlog_napi/0 */
}

/*
 * Whether the run of a thread is over although no event ended it: after the poll GRO
 * passes on the packets that it still holds, and then the thread may sleep.
 */
static __always_inline int left(struct cpu *c)
{
	return c->run == RUN_THREAD && c->stint != stint();
}

/*
 * The softirqs that may handle packets. Tasklets: TCP small queues, IFB. Timers: TCP
 * pacing (hrtimer) and retransmission.
 */
static __always_inline int may_be_network(unsigned int vec)
{
	return vec == NET_RX_SOFTIRQ || vec == NET_TX_SOFTIRQ || vec == TASKLET_SOFTIRQ ||
	       vec == HRTIMER_SOFTIRQ || vec == TIMER_SOFTIRQ;
}

static __always_inline void begin(struct cpu *c, __u32 run, __u64 now)
{
	struct task_struct *t = (void *)bpf_get_current_task_btf();

	c->stint = stint();
	c->run = run;
	c->last = now;
	c->spent = 0;
	c->stands = 0;
	c->counted = 0;
	c->pot = 0;
	c->shares = 0;
	c->cur = POT;
	c->network = 0;
	c->steered = 0;
	c->deferred = 0;
	c->from_ifb = 0;
	c->by_socket = 0;
	c->peer = 0;
	c->sender = 0;
	c->events += 2 * c->weight; /* its beginning and its end */
	c->runs += c->weight;
	if (c->epoch != fl_epoch) {
		c->epoch = fl_epoch;
		c->set = 0;
		c->sent_ifindex = 0;
	}
	c->victim = 0;
	if (!t->pid)
		c->kind = KIND_IDLE;
	else if (t->flags & PF_KTHREAD && t->comm[0] == 'k' && t->comm[1] == 's' &&
		 t->comm[2] == 'o' && t->comm[3] == 'f' && t->comm[4] == 't')
		c->kind = KIND_KSOFTIRQD;
	else {
		c->kind = run == RUN_THREAD || (t->flags & PF_KTHREAD && napi_thread()) ? KIND_THREAD : KIND_TASK;
		c->victim = of_task(c, t);
	}
}

/*
 * Whether the packet that begins now is in no run, or in one that is not sampled. The
 * run of a thread begins with its first packet.
 */
static __always_inline int unseen(struct cpu *c)
{
	if (left(c))
		end(c, c->last);
	if (c->run)
		return 0;
	if (fl_bare || !napi_thread())
		return 1; /* outside of a window, or a task's own work, such as a write to a tun device */
	if (sampled(c))
		return 0;
	c->stint = stint();
	c->skip = RUN_THREAD;
	c->skip_at = bpf_ktime_get_ns();
	return 1;
}

/* A packet begins: it ends the interval of the last one. */
static __always_inline void comes(struct cpu *c)
{
	__u64 now = bpf_ktime_get_ns();

	if (!c->run)
		begin(c, RUN_THREAD, now);
	else
		close(c, now);
	c->network = 1;
	c->events += c->weight;
	c->by_socket = 0;
}

/* Returns the class of a packet by its network header at l3. */
static __always_inline __u32 protocol_at(unsigned char *l3, __u16 protocol)
{
	__u8 p = 0;

	if (protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_probe_read_kernel(&p, 1, l3 + 9))
			return OTHER;
		return class_of(p);
	}
	if (protocol != bpf_htons(ETH_P_IPV6) || bpf_probe_read_kernel(&p, 1, l3 + 6))
		return OTHER;
	/* Skip one header of fragmentation or options, and no more. */
	if ((p == IPPROTO_FRAGMENT || p == IPPROTO_HOPOPTS || p == IPPROTO_DSTOPTS) &&
	    bpf_probe_read_kernel(&p, 1, l3 + 40))
		return OTHER;
	return class_of(p);
}

/* When a packet is received, data points to the network header. */
static __always_inline __u32 protocol(struct sk_buff *skb)
{
	return protocol_at(skb->data, skb->protocol);
}

static __always_inline __u32 protocol_sent(struct sk_buff *skb)
{
	return protocol_at(skb->head + skb->network_header, skb->protocol);
}

/* Whether a received packet encapsulates another, for a tunnel of the host. */
static __always_inline int carries(struct sk_buff *skb, __u32 class)
{
	__u16 port = 0;
	int off;

	if (class == ENCAPSULATED)
		return 1;
	if (class != UDP)
		return 0;
	/* Only without IP options; the system pays for a packet that has some. */
	off = skb->protocol == bpf_htons(ETH_P_IP) ? 22 : 42;
	bpf_probe_read_kernel(&port, sizeof(port), skb->data + off);
	port = bpf_ntohs(port);
	return fl_vxlan_port(port) || port == FL_PORT_GENEVE;
}

/* Three letters of a device's kind (rtnetlink(7)) tell tunnels and IFBs from others. */
#define KIND(a, b, c) ((a) | (b) << 8 | (c) << 16)

static __always_inline __u32 kind_of(struct net_device *dev)
{
	const struct rtnl_link_ops *ops = dev->rtnl_link_ops;
	__u32 kind = 0;

	if (ops) /* else it is hardware */
		bpf_probe_read_kernel_str(&kind, sizeof(kind), ops->kind);
	return kind;
}

/*
 * Whether a device queues packets and then receives them once more where they came
 * from: an IFB of the host. An IFB in a container's namespace does not count.
 */
static __always_inline int defers(struct net_device *to, __u32 dev)
{
	return dev & HOST_SIDE && kind_of(to) == KIND('i', 'f', 'b');
}

/*
 * Whether a device receives inner packets of those for which carries() is true. That
 * alone proves nothing: anybody can send a packet that looks encapsulated.
 */
static __always_inline int unpacks(struct net_device *dev)
{
	switch (kind_of(dev)) {
	case KIND('v', 'x', 'l'):
	case KIND('g', 'e', 'n'): /* geneve */
	case KIND('g', 'r', 'e'):
	case KIND('e', 'r', 's'): /* erspan */
	case KIND('i', 'p', '6'): /* gre, gretap, erspan, tnl */
	case KIND('i', 'p', 'i'): /* ipip */
	case KIND('s', 'i', 't'):
	case KIND('v', 't', 'i'): /* and vti6 */
	case KIND('x', 'f', 'r'): /* xfrm */
		return 1;
	}
	return 0;
}

/* Whether this is the last packet again, at the next device, such as a bridge. */
static __always_inline int further(struct cpu *c, struct sk_buff *skb)
{
	return c->cur != POT && c->skb == (__u64)skb &&
	       (c->ifindex != skb->dev->ifindex || c->netns != fl_netns_of(skb->dev));
}

/* How many packets of the wire a GSO packet contains. */
static __always_inline __u64 segments(struct sk_buff *skb)
{
	struct skb_shared_info *info = (void *)(skb->head + skb->end);
	__u16 n = 0;

	bpf_probe_read_kernel(&n, sizeof(n), (void *)info + bpf_core_field_offset(info->gso_segs));
	return n ? n : 1;
}

/* A packet begins, with an owner that is not known yet. */
static __noinline void open(struct cpu *c, struct sk_buff *skb, __u32 dev)
{
	int i;

	fl_take_fate(); /* left by a run that was not sampled */
	c->cur = OPEN;
	c->skb = (__u64)skb;
	c->sender = 0;
	c->netns = fl_netns_of(skb->dev);
	c->ifindex = skb->dev->ifindex;
	c->bytes = skb->len;
	c->proto = protocol(skb);
	c->nested = dev & NESTED;
	/* The tunnels of the host end in namespaces that user space knows. */
	c->outer = !c->nested && carries(skb, c->proto);
	c->to_ifb = 0;
	c->from_ifb = c->run == TASKLET_SOFTIRQ && dev & HOST_SIDE;
	c->inner = 0;
	if (!c->nested && c->tunnel.packets && (c->netns != c->tunnel_netns || c->ifindex != c->tunnel_ifindex) &&
	    unpacks(skb->dev)) {
		c->inner = segments(skb);
		c->tunnel_used = c->last;
	}
	if (c->outer) {
		c->tunnel_netns = c->netns;
		c->tunnel_ifindex = c->ifindex;
	}
	if (!c->in_ring)
		return;
	/* An older packet at the same address is done. */
	for (i = 0; i < RING; i++) {
		if (c->ring[i].skb == c->skb)
			done_with(c, &c->ring[i]);
	}
}
