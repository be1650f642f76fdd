/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The maps of account.bpf.c, in addition to those of charges.h, fate.h and identity.h. */

/* Pairs of victim and culprit. */
#define MAX_THEFTS 16384

/* Classes of packets: direction and protocol. */
#define RECEIVE 0
#define SEND 4
#define UDP 0
#define TCP 1
#define ENCAPSULATED 2
#define OTHER 3
#define CLASSES 8

/* The kind of the victim, in addition to its slot. */
#define KIND_TASK 0
#define KIND_KSOFTIRQD 1
#define KIND_IDLE 2
#define KIND_THREAD 3
#define KIND_PEER 4 /* a task of the packets' sender; see peers() */

/*
 * The owner of a device as a CPU caches it: the account, the flags of struct fl_owner, and
 * whether it is in a namespace that a tenant may have made.
 */
#define SLOT 0xffff
#define HOST_END (FL_HOST_END << 16)
#define HOST_SIDE (FL_HOST_SIDE << 16)
#define NESTED (1U << 31)

/*
 * Slot of identity.h -> account that is charged for the tenant's packets. Containers that
 * share a network have one such account. User space writes it.
 */
MAP(fl_payers, ARRAY, FL_MAX_TENANTS, __u32, __u32);

/*
 * cgroup v2 id -> account of the container. It is by container, not by tenant: each
 * container of a pod has an account and is robbed through its own tasks. User space
 * writes it, and reports an error when it is full; a cgroup without an entry has no
 * account.
 */
SPARSE(fl_containers, FL_MAX_CGROUPS, __u64, __u32);

#define MAX_NESTED 4096

/* The last sender in a namespace that user space does not know. */
struct fl_nested {
	__u64 cgroup;
	__u64 tenant; /* cgroup of the container in it; 0: none */
	__u32 epoch;  /* fl_epoch at that time */
	__u32 pad;
};

/*
 * Inode of such a namespace -> the last sender there, by the cgroup of its task. Any user
 * who may create a user namespace can create one. When the map is full, the least
 * recently used entry goes.
 */
MAP(fl_nested, LRU_HASH, MAX_NESTED, __u32, struct fl_nested);

struct work {
	__u64 ns;
	__u64 packets;
	__u64 bytes;
};

struct account {
	struct work by[CLASSES];
	__u64 own;    /* the part in ns that ran in the tenant's own time */
	__u64 took;   /* the part in ns that ran in other tasks' or ksoftirqd's time */
	__u64 robbed; /* ns of its tasks' time that went into the packets of others */
};

MAP(fl_accounts, PERCPU_ARRAY, MAX_SLOTS, __u32, struct account);

struct theft {
	__u16 victim; /* slot; 0: no tenant */
	__u16 kind;
	__u16 culprit;
	__u16 pad;
};

MAP(fl_thefts, PERCPU_HASH, MAX_THEFTS, struct theft, __u64);

/*
 * Number in a packet's stamp -> slot of the tenant that stamps packets with it; 0: none.
 * User space draws the numbers at random. Another agent on this kernel (nodes that are
 * containers, as with kind) draws others, and its stamps stay on packets that a veth
 * brings here.
 */
MAP(fl_stamps, ARRAY, 1 << 16, __u32, __u32);

#define ENTRIES 8
#define RING 8
#define SEEN 1024

/* One victim, one culprit, one class of packets. */
struct entry {
	__u64 key; /* 0: free */
	__u64 ns;
	__u64 packets;
	__u64 bytes;
	__u64 shares; /* shares in the pot of this run */
};

struct seen {
	__u32 netns;
	__u32 ifindex;
	__u32 value;
	__u32 epoch; /* fl_epoch at that time */
};

struct ringed {
	__u64 skb;
	__u64 ns;
	__u64 slot; /* the owner if nothing else identifies it */
};

/* The cost so far of packets that wait in a queue before their owner is known. */
struct pool {
	__u64 ns;
	__u64 packets;
	__u64 seen; /* arrival of the last one */
};

/* The state of each CPU. Only its own softirqs and threads write here. */
struct cpu {
	/* Since Open; user space reads these. */
	__u64 softirq; /* ns from softirq_entry, or the interrupt before it, to softirq_exit */
	__u64 thread;  /* ns of NAPI threads' polls */
	__u64 lost;    /* thefts that found fl_thefts full */
	__u64 whole;   /* the part of softirq in NET_RX and NET_TX, without the interrupts before */
	__u64 bare;    /* ns of NET_RX and NET_TX between windows, which are no part of softirq */
	__u64 later;   /* forwarded packets that a queue or timer of the host sent */

	__u64 last;    /* start of the interval; outside of a run: end of the last run */
	__u64 spent;   /* ns of the run and of the runs that it stands for */
	__u64 stands;  /* ns of those, if each were as long as this run */
	__u64 counted; /* ns of those, scaled by ratio */
	__u64 pot;     /* ns of the run between its packets */
	__u64 own;     /* ns of these programs in the interval, as fl_own */
	__u64 shares;  /* packets that share the pot */
	__u64 flushed; /* when flush() last ran */
	__u64 irq;     /* start of the last interrupt outside of a run */
	__u64 irq_end; /* end of that; 0: a run includes it already, or there is none */
	__u64 call;    /* it was a function call from another CPU, not a timer */
	__u64 before;  /* ns of the interrupt that is a part of the run */
	__u32 run;     /* 0: none; else the vector, or RUN_THREAD */
	__u32 network; /* the run handled packets */
	__u32 steered; /* the poll of a NIC handed packets to other CPUs */
	__u32 deferred; /* packets that the run redirected to an IFB */
	__u32 found;   /* result of entry() */
	__u32 cur;     /* what the interval is for: an entry, or POT, OPEN */
	__u32 owner;   /* owner of that entry */
	__u32 by_socket; /* a socket identified the owner */
	__u32 kind;    /* victim of the run */
	__u32 victim;
	__u32 epoch;   /* epoch of the caches below */

	/*
	 * Sampling: on a busy CPU one run in weight, chosen at random, is sampled. It
	 * stands for the others.
	 */
	__u32 weight;
	__u32 skip;    /* the current run, if it is not sampled: a vector, or RUN_THREAD */
	__u32 chance;
	__u64 stint;   /* at the start of the run */
	__u64 events;  /* since window, those of runs that are not sampled included */
	__u64 runs;
	__u64 window;

	/* Runs that are not sampled: pass(), rate(). */
	__u64 skip_at; /* start of the run in skip */
	__u64 passed;  /* their time in ns since ratio was set */
	__u64 stood;   /* the same, if each were as long as the run that stands for it */
	__u64 looked;  /* sampled runs since ratio was set */
	__s64 owed;    /* ns of them that are not charged yet */
	__u64 ratio;   /* length of such a run relative to a sampled one, in 1/1024; 0: not known */

	/* The device that the last packet was sent to. */
	__u32 sent_netns;
	__u32 sent_ifindex;

	/* The open packet. */
	__u64 skb;
	__u32 netns; /* device that received it */
	__u32 ifindex;
	__u32 proto;
	__u32 nested;  /* in a namespace that a tenant may have made */
	__u32 outer;   /* it encapsulates another packet */
	__u32 to_ifb;  /* it is redirected to an IFB */
	__u32 from_ifb; /* it may come from an IFB of the host */
	__u32 inner;   /* packets of the wire in it, if it was encapsulated; else 0 */
	__u32 ringed;  /* next index into ring */
	__u32 in_ring;
	__u32 bytes;
	__u32 peer;    /* receiver of a packet that the run's victim sent in it; 0: none */
	__u32 sender;  /* tenant at whose host end the run received skb; 0: none */
	__u32 pad;

	/*
	 * tunnel holds outer packets that are done, until the inner packets leave the
	 * tunnel's own queue. ifb holds packets that wait in an IFB, until its tasklet
	 * receives them again.
	 */
	struct pool tunnel;
	struct pool ifb;
	__u64 tunnel_used; /* when a tunnel device last received a packet */
	__u32 tunnel_netns;
	__u32 tunnel_ifindex;

	__u64 set; /* css_set of the last task, and its slot */
	__u32 set_slot;

	/* Open packets that wait for the second pass over a list. */
	struct ringed ring[RING];
	struct entry entries[ENTRIES];
	struct seen seen[SEEN];
};

#define POT 0x100
#define OPEN 0x101
#define RUN_THREAD 0x100

MAP(fl_cpus, PERCPU_ARRAY, 1, __u32, struct cpu);

static __always_inline struct cpu *this_cpu(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fl_cpus, &zero);
}
