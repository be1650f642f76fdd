/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The maps of latency.bpf.c and their types. */

/* Up to 17 s, which is also the lifetime of a stamp. */
#define HIST_SUB_BITS 3
#define HIST_TOP_BITS 34

#include "hist.h"
#include "map.h"

/* Directions, as seen from the container. */
#define EGRESS 0
#define INGRESS 1
/* In a stamp only: the host itself sends to a container. */
#define FROM_HOST 2

/* Protocols. */
#define TCP 0
#define UDP 1
#define ICMP 2
#define OTHER 3
#define PROTOCOLS 4

/*
 * Histograms of one direction, by index. Also stages.go. FIRST is the qdisc of the
 * container's device on egress; GRO and the backlog of the uplink on ingress.
 */
#define FIRST 0
#define DELIVER 1 /* through the veth to its other end */
#define FORWARD 2 /* bridge, netfilter, routing, tunnel */
#define QDISC 3   /* of the uplink on egress, of the host end on ingress */
#define SOCKET 4  /* from the container's device to its socket */
#define ADDED 5   /* between the container's device and the uplink */
#define STACK 6   /* between the container's socket and the uplink */
#define LOCAL 7   /* from one container's device to another's */
#define STAGES 8

struct histogram {
	__u64 sum; /* ns */
	__u64 count[HIST_BUCKETS];
};

/* The counters of one tenant, direction and protocol. */
struct tally {
	__u64 seen;
	__u64 matched;    /* measured between the container's device and the uplink */
	__u64 local;      /* between two containers of this host, or from the host itself */
	__u64 unsampled;  /* arrived without a stamp while packets were passed over */
	__u64 unmatched;  /* never reached the uplink, or arrived without a stamp */
	__u64 mismatched; /* the stamp belonged to another packet */
	__u64 evicted;    /* lost the stamp to a newer packet */
	__u32 window;     /* of time */
	__u32 emitted;    /* records in the window */
	struct histogram stage[STAGES];
};
_Static_assert(sizeof(struct tally) == 8 * (8 + STAGES * (1 + HIST_BUCKETS)), "read by meter.go");

/* slot -> tallies of one tenant, by direction and protocol. User space makes them. */
struct tallies {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * PROTOCOLS);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct tally)); /* not a type: clang 14 would emit its name only */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__array(values, struct tallies);
} fl_tallies SEC(".maps");

/* The result of device_of(): a role, and the slot of the tenant. */
#define SLOT 0xffff
#define CONTAINER 0x10000 /* in the tenant's own namespace */
#define HOST_END 0x20000  /* the host end of the tenant's veth */
#define UPLINK 0x30000
#define ROLE 0x30000

/* Flags of a tenant, by slot. Also meter.go. */
#define MEASURED 1
#define TRACED 2 /* its packets are recorded one by one */
#define HOST 4   /* in the host's network namespace: only sockets identify its packets */
__u8 fl_tenants[65536];

/* Number of tenants without a device that shows arrival: in the host's namespace, or macvlan. */
__u32 fl_unseen;

/* The inode of the host's network namespace, and its uplinks by index; 0: no more. */
const volatile __u32 fl_host_netns;
#define UPLINKS 64
__u32 fl_uplinks[UPLINKS];

/*
 * The hooks at which devices are of interest, by index modulo NEAR, in any namespace. A
 * packet at another hook costs no look-up. Bit h: a packet may begin at hook h. Bit 4 + h: one
 * that has begun continues there.
 */
#define NEAR 4096
#define NEAR_UPLINK 0x100
__u16 fl_near[NEAR];

/* Packets that each CPU may begin to measure in 2^WINDOW_BITS ns; see admit(). */
#define WINDOW_BITS 24
__u32 fl_budget;

/* When a packet was last passed over, ns; exact to some jiffies. */
__u64 fl_passed_at;

/* When the programs were last attached, ns. Stamps from before are void. */
__u64 fl_attached_at;

/* The fields of a packet that records and check_of() use. */
struct flow {
	__u8 from[16]; /* IPv4 in the first four */
	__u8 to[16];
	__be16 from_port;
	__be16 to_port; /* of ICMP: the sequence number */
	__u32 seq;      /* TCP's; type and code of ICMP */
	__u8 family;    /* 4 or 6; 0: no IP */
	__u8 protocol;  /* IPPROTO_ */
	__u16 id;       /* of IPv4 */
	__u32 len;      /* of the IP packet */
	__u8 flags;     /* TCP's */
	__u8 pad[3];
};

/* Points on the path: the indices of stamp.at. */
#define E_QUEUED 0  /* IP has handed it to the container's device */
#define E_SENT 1    /* its driver */
#define E_ARRIVED 2 /* at the host's end */
#define E_QDISC 3   /* of the uplink */
#define I_POLLED 0  /* the uplink's driver hands it to GRO */
#define I_RECEIVED 1
#define I_QDISC 2 /* of the host's end */
#define I_SENT 3  /* by its driver */
#define POINTS 4

struct stamp {
	__u64 at[POINTS]; /* ns; 0: not passed */
	__u32 slot;
	__u32 check; /* see check_of(); 0: unknown */
	__u8 direction;
	__u8 protocol;
	__u8 traced;
	__u8 host_mode;
	__u32 wait; /* ticket in fl_kept; 0: none */
	struct flow flow; /* set if traced */
};

/*
 * The stamps of packets under way, by the address of the skb. A hash table of our own: a
 * look-up costs one cache line, and evictions are counted. A program that has replaced the
 * address by BUSY owns the stamp.
 */
#define ROW_BITS 12
#define ROW 8
#define BUSY 1

/* Rows in use, a power of two. Experiments use fewer. */
const volatile __u32 fl_rows = 1 << ROW_BITS;

struct keys {
	__u64 skb[ROW]; /* 0: free */
};

struct keys fl_keys[1 << ROW_BITS]; /* in .bss, so that a row is one cache line */

MAP(fl_stamps, ARRAY, ROW << ROW_BITS, __u32, struct stamp);

/* When a packet was last segmented, in jiffies: for SPLIT_JIFFIES, segments look for its stamp. */
#define SPLIT_JIFFIES 1024
__u64 fl_split_at;

/* The record of one packet, for user space. */
#define RECORD 0
#define AT_SOCKET 1 /* adds the times at the socket to the record with the same id */
struct record {
	__u64 at; /* ns; the end of the path */
	__u64 id; /* of the packet */
	__u64 stage[STAGES]; /* ns; NONE: unknown */
	struct flow flow;
	__u32 slot;
	__u8 direction;
	__u8 kind;
	__u8 awaits; /* AT_SOCKET may follow */
	__u8 pad[5];
};
_Static_assert(sizeof(struct record) == 144, "read by parse.go");
#define NONE (~0ULL)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} fl_records SEC(".maps");

/* Records without room in fl_records, or beyond MAX_EMITTED. */
__u64 fl_lost;

struct cpu {
	__u64 key; /* see address() */
	__u64 jiffy;   /* now is its time: a clock without cost */
	__u32 skip;    /* packets to pass over before the next admission */
	__u32 gap;     /* mean distance of admitted packets */
	__u32 begun;   /* admitted in the window */
	__u32 reserved;
	__u64 passed;  /* events passed over */
	__u64 before;  /* passed at the beginning of the window */
	__u64 now;     /* ns */
	__u64 window;  /* its beginning, ns */
	__u64 evicted; /* stamps of packets without a known tenant */
	/* The packet that this CPU delivers, if a socket receives it. */
	__u64 since; /* at the container's device; 0: none */
	__u64 began; /* at the uplink */
	__u64 id;
	__u32 slot; /* 0: unknown; fl_socket knows it */
	__u32 ifindex;
	__u32 len;
	__u8 protocol;
	__u8 traced;
	__u16 pad;
	__u64 polled; /* at the uplink, of a packet without a slot */
	__u32 wait;   /* as in struct stamp, of a packet without a slot */
	__u32 pad2;
	struct flow flow;
};

MAP(fl_cpus, PERCPU_ARRAY, 1, __u32, struct cpu);
