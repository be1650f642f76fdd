/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * When the application sent a packet, and when it began to read one: the span that the
 * MACE paper measures. Only for traced tenants.
 *
 * Hooks (tp_btf), attached only while the host is watched:
 *   sys_enter                a task calls the kernel to send
 *   skb_copy_datagram_iovec  a task reads from a packet
 * Cost: for each system call of the host the slow entry path and five comparisons. For one
 * that sends, a look-up; if the tenant is traced, a clock and a map entry too.
 *
 * The socket connects a packet to a call. A packet without a certain call has no such time.
 * Full maps evict the least recently used socket or packet, which then has no such time. The
 * record shows that.
 */

/* The numbers of the system calls that send. User space fills them in for its architecture. */
const volatile __u32 fl_sends[5];

struct pt_regs___x86 {
	unsigned long di;
} __kernel_type;

struct pt_regs___arm64 {
	__u64 regs[31];
} __kernel_type;

struct inode {
	unsigned short i_mode;
} __kernel_type;

struct file {
	struct inode *f_inode;
	void *private_data;
} __kernel_type;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} __kernel_type;

struct files_struct {
	struct fdtable *fdt;
} __kernel_type;

struct nsproxy {
	struct net *net_ns;
} __kernel_type;

struct task_struct___app {
	struct files_struct *files;
	struct nsproxy *nsproxy;
} __kernel_type;

struct socket {
	struct sock *sk;
} __kernel_type;

struct sock___app {
	__u16 sk_protocol;
} __kernel_type;

typedef struct {
	__s64 counter;
} __kernel_type atomic64_t;

struct sock_common___app {
	atomic64_t skc_cookie;
} __kernel_type;

struct tcp_sock {
	__u32 write_seq;
	__u32 copied_seq;
} __kernel_type;

/* How the kernel marks a 32-bit system call, which has another number. */
struct thread_info___x86 {
	__u32 status;
} __kernel_type;

struct thread_info___arm64 {
	unsigned long flags;
} __kernel_type;

struct task_struct___x86 {
	struct thread_info___x86 thread_info;
} __kernel_type;

struct task_struct___arm64 {
	struct thread_info___arm64 thread_info;
} __kernel_type;

#define TS_COMPAT 0x0002         /* arch/x86/include/asm/thread_info.h */
#define ARM64_TIF_32BIT (1 << 22) /* arch/arm64/include/asm/thread_info.h */

/* include/uapi/linux/stat.h */
#define S_IFMT 0170000
#define S_IFSOCK 0140000

/* The latest calls that send by a socket. */
#define CALLS 8
struct calls {
	__u64 count;
	struct {
		__u64 at;   /* ns */
		__u32 seq;  /* TCP: of the first byte of this call */
		__u32 task; /* its id */
	} call[CALLS];
};

/* By the address of the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct calls);
} fl_calls SEC(".maps");

/* A packet in a socket's queue that the application has not begun to read. */
struct held {
	__u64 id; /* 0: none */
	__u64 began;
	__u32 seq;
	__u32 pad;
};
#define HELD_BUSY 1 /* an id while another CPU writes the rest */

#define HOLDS 32
struct holds {
	struct held at[HOLDS];
};

/* TCP: by the cookie of the socket, because packets are merged in its queue. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 2048);
	__type(key, __u64);
	__type(value, struct holds);
} fl_holds SEC(".maps");

/* Other protocols: by the address of the packet's bytes, which its clones share. */
struct one_held {
	struct held held;
	__u32 check;
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct one_held);
} fl_held SEC(".maps");

/* A new entry of fl_holds; too large for the stack. */
const struct holds fl_no_holds;

/* Reports whether the current task belongs to a traced tenant. */
static __always_inline int task_traced(struct task_struct *t)
{
	struct task_struct___app *a = (void *)t;
	struct fl_device at = {};
	struct fl_owner *o;
	__u16 tenant;

	at.netns = BPF_CORE_READ(a, nsproxy, net_ns, ns.inum);
	if (at.netns == fl_host_netns) {
		tenant = fl_of_cgroup(fl_cgroup_of_task(t));
	} else {
		o = bpf_map_lookup_elem(&fl_devices, &at); /* index 0: the namespace itself */
		if (!o)
			return 0;
		tenant = o->tenant;
	}
	return !!(fl_tenants[tenant] & TRACED);
}

/* Returns the socket behind a descriptor of a task as a number, or 0. */
static __always_inline __u64 socket_of(struct task_struct___app *t, __u32 fd)
{
	struct fdtable *fdt = BPF_CORE_READ(t, files, fdt);
	struct file **files = BPF_CORE_READ(fdt, fd), *f = 0;
	struct socket *s;

	if (fd >= BPF_CORE_READ(fdt, max_fds) || bpf_probe_read_kernel(&f, sizeof(f), files + fd) || !f)
		return 0;
	if ((BPF_CORE_READ(f, f_inode, i_mode) & S_IFMT) != S_IFSOCK)
		return 0;
	s = BPF_CORE_READ(f, private_data);
	return (__u64)BPF_CORE_READ(s, sk);
}

/* Reports whether a task is in a 32-bit system call. */
static __always_inline int compat(struct task_struct *t)
{
	struct task_struct___x86 *x86 = (void *)t;
	struct task_struct___arm64 *arm64 = (void *)t;

	if (bpf_core_field_exists(x86->thread_info.status))
		return BPF_CORE_READ(x86, thread_info.status) & TS_COMPAT;
	return BPF_CORE_READ(arm64, thread_info.flags) & ARM64_TIF_32BIT;
}

SEC("tp_btf/sys_enter")
int BPF_PROG(fl_send, struct pt_regs *regs, long id)
{
	struct task_struct *t;
	struct calls none = {}, *c;
	struct sock___app *sk;
	__u64 key, fd, i;

	if (id != fl_sends[0] && id != fl_sends[1] && id != fl_sends[2] && id != fl_sends[3] && id != fl_sends[4])
		return 0;
	t = bpf_get_current_task_btf();
	if (compat(t) || !task_traced(t))
		return 0;
	if (bpf_core_field_exists(struct pt_regs___x86, di))
		fd = BPF_CORE_READ((struct pt_regs___x86 *)regs, di);
	else
		fd = BPF_CORE_READ((struct pt_regs___arm64 *)regs, regs[0]);
	key = socket_of((void *)t, fd);
	if (!key)
		return 0; /* a file, for example */
	c = bpf_map_lookup_elem(&fl_calls, &key);
	if (!c) {
		bpf_map_update_elem(&fl_calls, &key, &none, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&fl_calls, &key);
		if (!c)
			return 0; /* its packets get no time */
	}
	i = __sync_fetch_and_add(&c->count, 1) % CALLS;
	sk = (void *)key;
	c->call[i].seq = BPF_CORE_READ(sk, sk_protocol) == IPPROTO_TCP ? BPF_CORE_READ((struct tcp_sock *)sk, write_seq) : 0;
	c->call[i].task = bpf_get_current_pid_tgid();
	c->call[i].at = bpf_ktime_get_ns();
	return 0;
}

/*
 * Returns when the application called to send a packet that IP hands to a device, ns; 0 if
 * unknown. l3 is the address of its IP header, len the length from there on. For TCP it is
 * the call that wrote the first byte. For other protocols it is the latest call of the
 * current task; a packet that waited for neighbour resolution leaves in another task, so its
 * call is unknown.
 */
__noinline __u64 fl_called(__u64 sk, __u64 l3, __u32 len)
{
	struct flow f = {};
	struct calls *c;
	__u32 task = bpf_get_current_pid_tgid();
	__u8 offset = 0;
	__u64 count;
	int length;

	length = fl_parse(l3, &f);
	if (!length)
		return 0;
	if (f.protocol == IPPROTO_TCP) {
		bpf_probe_read_kernel(&offset, 1, (void *)l3 + length + 12);
		if (length + (offset >> 4) * 4 >= len)
			return 0; /* without payload */
	}
	c = bpf_map_lookup_elem(&fl_calls, &sk);
	if (!c)
		return 0;
	count = c->count;
	for (__u64 n = 1; n <= CALLS && n <= count; n++) {
		__u32 i = (count - n) % CALLS;

		if (f.protocol != IPPROTO_TCP)
			return c->call[i].task == task ? c->call[i].at : 0;
		if ((__s32)(f.seq - c->call[i].seq) >= 0)
			return c->call[i].at;
	}
	return 0; /* the call is no longer kept */
}

static __always_inline __u64 called(const struct sk_buff *skb)
{
	__u64 head = 0, data = 0, sk = 0, l3;

	bpf_core_read(&head, sizeof(head), &skb->head);
	bpf_core_read(&data, sizeof(data), &skb->data);
	bpf_core_read(&sk, sizeof(sk), &skb->sk);
	l3 = head + skb->network_header;
	return sk ? fl_called(sk, l3, skb->len - (__u32)(l3 - data)) : 0;
}

/* Values of record.awaits. */
#define AWAITS_SOCKET 1
#define AWAITS_READ 2 /* AT_APPLICATION may follow */

/*
 * Registers a packet of a traced tenant that a socket receives, before any reader can have
 * read from it, so that fl_read finds it. The data of skb begins with the IP header.
 */
static __always_inline __u8 hold(struct __sk_buff *skb, const struct cpu *c)
{
	struct one_held one = {.held = {.id = c->id, .began = c->began}};
	struct bpf_sock *sk = skb->sk;
	struct bpf_tcp_sock *tp;
	struct holds *h;
	__u8 first = 0, offset = 0;
	__be32 seq = 0;
	__u64 cookie;
	__u32 length, end;

	if (c->protocol == UDP)
		return 0; /* the kernel has no event for reading a datagram */
	if (c->protocol != TCP) {
		one.check = c->check;
		return c->head && !bpf_map_update_elem(&fl_held, &c->head, &one, BPF_ANY) ? AWAITS_READ : 0;
	}
	if (bpf_skb_load_bytes(skb, 0, &first, 1))
		return 0;
	length = first >> 4 == 4 ? (first & 15) * 4 : sizeof(struct ipv6hdr);
	if (bpf_skb_load_bytes(skb, length + 4, &seq, sizeof(seq)) || bpf_skb_load_bytes(skb, length + 12, &offset, 1))
		return 0;
	length += (offset >> 4) * 4;
	if (length >= skb->len)
		return 0; /* without payload */
	one.held.seq = bpf_ntohl(seq);
	end = one.held.seq + skb->len - length;
	sk = sk ? bpf_sk_fullsock(sk) : 0;
	tp = sk ? bpf_tcp_sock(sk) : 0;
	if (!tp)
		return 0;
	if ((__s32)(end - tp->rcv_nxt) <= 0)
		return 0; /* a retransmission */
	cookie = bpf_get_socket_cookie(skb);
	h = bpf_map_lookup_elem(&fl_holds, &cookie);
	if (!h) {
		bpf_map_update_elem(&fl_holds, &cookie, &fl_no_holds, BPF_NOEXIST);
		h = bpf_map_lookup_elem(&fl_holds, &cookie);
		if (!h)
			return 0;
	}
	for (int i = 0; i < HOLDS; i++) {
		struct held *at = &h->at[i];

		if (at->id || !__sync_bool_compare_and_swap(&at->id, 0, HELD_BUSY))
			continue;
		at->began = one.held.began;
		at->seq = one.held.seq;
		*(volatile __u64 *)&at->id = one.held.id;
		return AWAITS_READ;
	}
	return 0; /* the application is slow; the first packets suffice */
}

/* Emits that the application reads from a packet. */
static __always_inline void read_by(__u64 id, __u64 began)
{
	struct record r = {.id = id, .kind = AT_APPLICATION, .direction = INGRESS};

	r.at = bpf_ktime_get_ns();
	r.mace = between(began, r.at);
	fl_emit(&r);
}

/*
 * The application reads len bytes from a packet. For TCP they begin at copied_seq, which the
 * kernel advances afterwards; a packet counts once its first byte is among them.
 */
SEC("tp_btf/skb_copy_datagram_iovec")
int BPF_PROG(fl_read, const struct sk_buff *skb, int len)
{
	struct sock___app *sk = 0;
	struct one_held *one;
	struct flow f = {};
	struct holds *h;
	__u64 head = 0, cookie = 0, id;
	__u32 copied;

	if (!task_traced(bpf_get_current_task_btf()))
		return 0;
	bpf_core_read(&head, sizeof(head), &skb->head);
	one = bpf_map_lookup_elem(&fl_held, &head);
	if (one) {
		id = one->held.id;
		/* If the registered skb was freed unread, these bytes may belong to another packet. */
		if (fl_parse(head + skb->network_header, &f) && check_of(&f) == one->check)
			read_by(id, one->held.began);
		bpf_map_delete_elem(&fl_held, &head);
		return 0;
	}
	bpf_core_read(&sk, sizeof(sk), &skb->sk);
	if (!sk || BPF_CORE_READ(sk, sk_protocol) != IPPROTO_TCP)
		return 0;
	cookie = BPF_CORE_READ((struct sock_common___app *)sk, skc_cookie.counter);
	h = bpf_map_lookup_elem(&fl_holds, &cookie);
	if (!h)
		return 0;
	copied = BPF_CORE_READ((struct tcp_sock *)sk, copied_seq);
	for (int i = 0; i < HOLDS; i++) {
		struct held *at = &h->at[i];
		__u32 ahead;

		id = *(volatile __u64 *)&at->id;
		if (id <= HELD_BUSY)
			continue;
		ahead = at->seq - copied;
		if ((__s32)ahead >= len)
			continue; /* not yet */
		if ((__s32)ahead >= 0)
			read_by(id, at->began);
		/* otherwise its first byte was read without an event, by splice for example */
		*(volatile __u64 *)&at->id = 0;
	}
	return 0;
}
