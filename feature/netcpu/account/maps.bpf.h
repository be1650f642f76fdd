/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The maps of account.bpf.c, beside those of charges.h and identity.h. */

/* Pairs of victim and culprit that have met. */
#define MAX_THEFTS 16384

/* Classes of packets: direction and protocol. */
#define RECEIVE 0
#define SEND 4
#define UDP 0
#define TCP 1
#define ENCAPSULATED 2
#define OTHER 3
#define CLASSES 8

/* Whose time it was, beside the slot. */
#define KIND_TASK 0
#define KIND_KSOFTIRQD 1
#define KIND_IDLE 2
#define KIND_THREAD 3

/* Whose a device is, as it is kept: the account, and the flags of struct fl_owner. */
#define SLOT 0xffff
#define HOST_END (FL_HOST_END << 16)
#define HOST_SIDE (FL_HOST_SIDE << 16)
#define NESTED (FL_NESTED << 16)

struct work {
	__u64 ns;
	__u64 packets;
	__u64 bytes;
};

struct account {
	struct work by[CLASSES];
	__u64 own;    /* ns of all that in the tenant's own time, */
	__u64 took;   /* and in others' tasks' or ksoftirqd's */
	__u64 robbed; /* ns of its tasks' time that went into others' packets */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_SLOTS);
	__type(key, __u32);
	__type(value, struct account);
} fl_accounts SEC(".maps");

struct theft {
	__u16 victim; /* slot, 0: nobody's */
	__u16 kind;
	__u16 culprit;
	__u16 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, MAX_THEFTS);
	__type(key, struct theft);
	__type(value, __u64);
} fl_thefts SEC(".maps");

/* Which slots packets may be stamped with: those of tenants that have a stamp. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u32);
} fl_used SEC(".maps");

/* The tenant that was told, which is forgotten by that. */
static __always_inline __u32 dropped(void)
{
	__u32 zero = 0, slot, *told = bpf_map_lookup_elem(&fl_dropped, &zero);

	if (!told || !*told)
		return 0;
	slot = *told & SLOT;
	*told = 0;
	return slot;
}

#define ENTRIES 8
#define RING 8
#define SEEN 8

/* One victim, one culprit, one class of packets. */
struct entry {
	__u64 key; /* 0: free */
	__u64 ns;
	__u64 packets;
	__u64 bytes;
	__u64 shares; /* of the pot of this run */
};

struct seen {
	__u32 netns;
	__u32 ifindex;
	__u32 value;
	__u32 known;
};

struct ringed {
	__u64 skb;
	__u64 ns;
	__u64 slot; /* whose it is if nothing tells */
};

/* What packets have cost that are on their way to where it shows whose they are. */
struct pool {
	__u64 ns;
	__u64 packets;
	__u64 seen; /* when the last came */
};

/* What each CPU is at. Only its own softirqs and threads write here. */
struct cpu {
	/* Since Open; user space reads these two. */
	__u64 softirq; /* ns from softirq_entry, or the interrupt before it, to softirq_exit */
	__u64 thread;  /* ns of NAPI threads' polls */
	__u64 lost;    /* thefts that found fl_thefts full */

	__u64 last;    /* when the interval began; outside of a run: when the last one ended */
	__u64 spent;   /* ns of the run, and of those that it stands for: */
	__u64 stands;  /* were they as long as it is, */
	__u64 counted; /* and as they are, by ratio */
	__u64 pot;     /* ns of the run that lie between packets */
	__u64 shares;  /* packets that share it */
	__u64 flushed; /* when the table last went into the maps */
	__u64 irq;     /* when the last such interrupt outside of a run began, */
	__u64 irq_end; /* and ended; 0: a run has taken it, or none is due */
	__u64 call;    /* whether that was another CPU's call, no timer */
	__u32 run;     /* 0: none; else the vector, or RUN_THREAD */
	__u32 network; /* whether the run had to do with packets */
	__u32 steered; /* a NIC's poll brought packets that went to other CPUs */
	__u32 deferred; /* packets that the run has led to an IFB */
	__u32 found;   /* entry() */
	__u32 cur;     /* the interval is for: an entry, or POT, OPEN */
	__u32 owner;   /* of that entry */
	__u32 by_socket; /* a socket told the owner */
	__u32 kind;    /* the run's victim */
	__u32 victim;
	__u32 epoch;   /* of what is cached below */

	/*
	 * Sampling: of the runs of a busy CPU one in weight is looked at, by
	 * chance, and counts for as many.
	 */
	__u32 weight;
	__u32 skip;    /* the run that is not looked at: 0, a vector, or RUN_THREAD */
	__u32 chance;
	__u32 pid;      /* of the thread of a RUN_THREAD, */
	__u64 switches; /* and how often it had been switched out */
	__u64 events;  /* since window, also of runs that were not looked at */
	__u64 runs;
	__u64 window;

	/* Runs that are not looked at: pass(), rate(). */
	__u64 skip_at; /* when the one began that skip is of */
	__u64 passed;  /* ns of them, since ratio was chosen, */
	__u64 stood;   /* ns, had they been as long as those that stand for them, */
	__u64 looked;  /* and how many did */
	__s64 owed;    /* ns of them that nobody is charged for yet */
	__u64 ratio;   /* how long they are, in 1024th; 0: not known */

	/* Which device the last packet went to. */
	__u32 sent_netns;
	__u32 sent_ifindex;

	/* Of the packet that is open. */
	__u64 skb;
	__u32 netns; /* where it came in */
	__u32 ifindex;
	__u32 proto;
	__u32 nested;  /* in a namespace that a tenant may have made */
	__u32 outer;   /* it carries another, or */
	__u32 to_ifb;  /* is led to an IFB, or */
	__u32 from_ifb; /* may come out of one of the host's */
	__u32 inner;   /* it was carried by another */
	__u32 ringed;  /* next place in the ring */
	__u32 in_ring;
	__u32 bytes;
	__u32 pad;

	/*
	 * Packets that carry others, after their part is done and before the
	 * inner packets show up behind the tunnel's own queue; and those that an IFB
	 * has, which come in once more from its tasklet.
	 */
	struct pool tunnel;
	struct pool ifb;
	__u64 tunnel_used; /* when one came out of a tunnel's device */
	__u32 tunnel_netns;
	__u32 tunnel_ifindex;

	__u64 set; /* the last task's css_set, and its slot */
	__u32 set_slot;
	__u32 set_known;

	/* Open packets that another overtook: a list is handled in two passes. */
	struct ringed ring[RING];
	struct entry entries[ENTRIES];
	struct seen seen[SEEN];
};

#define POT 0x100
#define OPEN 0x101
#define RUN_THREAD 0x100

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu);
} fl_cpus SEC(".maps");

static __always_inline struct cpu *this_cpu(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fl_cpus, &zero);
}
