/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The maps of latency.bpf.c, and what is in them. */

/* Up to 17 s, which is also how long a stamp is believed. */
#define HIST_SUB_BITS 3
#define HIST_TOP_BITS 34

#include "hist.h"

/* Directions, as seen from the container. */
#define EGRESS 0
#define INGRESS 1
/* Of a stamp only: the host itself sends to a container. */
#define FROM_HOST 2

/* Protocols. */
#define TCP 0
#define UDP 1
#define ICMP 2
#define OTHER 3
#define PROTOCOLS 4

/*
 * Histograms of one direction, by index. Also latency.go: the stages. FIRST is
 * the qdisc of the container's device for what it sends; GRO and the backlog of
 * the uplink for what it receives.
 */
#define FIRST 0
#define DELIVER 1 /* over the veth, to whoever receives at its other end */
#define FORWARD 2 /* bridge, netfilter, routing, tunnel */
#define QDISC 3   /* of the uplink for what is sent; of the host end for what is received */
#define SOCKET 4  /* from the container's device to its socket */
#define ADDED 5   /* between the container's device and the uplink */
#define STACK 6   /* between the container's socket and the uplink */
#define LOCAL 7   /* from one container's device to another's */
#define STAGES 8

struct histogram {
	__u64 sum; /* ns */
	__u64 count[HIST_BUCKETS];
};

/* What is known of the packets of a tenant, a direction and a protocol. */
struct tally {
	__u64 seen;
	__u64 matched;    /* measured between the container's device and the uplink */
	__u64 local;      /* between two containers of this host, or from the host itself */
	__u64 unsampled;  /* arrived without a stamp while some packets were passed over */
	__u64 unmatched;  /* began and never came to the uplink; arrived without a stamp */
	__u64 mismatched; /* a stamp was found, and was another packet's */
	__u64 evicted;    /* lost the stamp to a newer packet */
	__u32 window;     /* of time, in which */
	__u32 told;       /* so many records were told */
	struct histogram stage[STAGES];
};
_Static_assert(sizeof(struct tally) == 8 * (8 + STAGES * (1 + HIST_BUCKETS)), "read by meter.go");

/* slot -> tallies of one tenant, by direction and protocol. User space makes them. */
struct tallies {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * PROTOCOLS);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct tally)); /* of a type in here clang 14 tells the name alone */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__array(values, struct tallies);
} fl_tallies SEC(".maps");

/* What a device is, as device_of() says it: a role, and the slot of its tenant. */
#define SLOT 0xffff
#define CONTAINER 0x10000 /* in the tenant's own namespace */
#define HOST_END 0x20000  /* the host's end of that tenant's veth */
#define UPLINK 0x30000
#define ROLE 0x30000

/* What is known of a tenant, by its slot. Also meter.go. */
#define MEASURED 1
#define TRACED 2 /* its packets are recorded one by one */
#define HOST 4   /* it is in the host's network namespace: only sockets tell its packets */
__u8 fl_tenants[65536];

/* Tenants for which no device is seen to receive: in the host's namespace, or macvlan. */
__u32 fl_unseen;

/* The inode of the host's network namespace, and its uplinks by index; 0: no more. */
const volatile __u32 fl_host_netns;
#define UPLINKS 64
__u32 fl_uplinks[UPLINKS];

/*
 * Which hooks devices of an index, modulo NEAR, are of interest at, in any
 * namespace: a packet at any other costs no look-up. Bit h: a packet may begin at
 * hook h. Bit 4 + h: one that has begun is looked at there.
 */
#define NEAR 4096
#define NEAR_UPLINK 0x100
__u16 fl_near[NEAR];

/* Packets that each CPU may begin to measure in 2^WINDOW_BITS ns; see admit(). */
#define WINDOW_BITS 24
__u32 fl_budget;

/* How long an event with a stamp takes, by hook, while fl_costing is set: records are asked for. */
#define HOOKS 4
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HOOKS);
	__type(key, __u32);
	__type(value, struct histogram);
} fl_costs SEC(".maps");

__u32 fl_costing;

/* When a packet was passed over last, to within some jiffies; ns. */
__u64 fl_passed_at;

/* When the programs were attached last, ns: what began before is not believed. */
__u64 fl_attached_at;

/* Who sent what, as a record and the flow check know it. */
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

/* Where a packet has been: the indices of stamp.at. */
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
	__u64 at[POINTS]; /* ns; 0: it has not been there */
	__u32 slot;
	__u32 check; /* what no host on the way changes; 0: not known */
	__u8 direction;
	__u8 protocol;
	__u8 traced;
	__u8 host_mode;
	__u32 wait;   /* its ticket in fl_kept; 0: it did not wait */
	__u64 called; /* when the application did, ns; 0: not known. If it is traced, as is */
	struct flow flow;
};

/*
 * The stamps of packets that are under way, by the address of the skb. A hash of
 * our own: a look costs one line of memory, and what is lost is counted. Who has put
 * BUSY in place of the address has the stamp.
 */
#define ROW_BITS 12
#define ROW 8
#define BUSY 1

/* How many rows are used, a power of two: fewer only where that is measured. */
const volatile __u32 fl_rows = 1 << ROW_BITS;

struct keys {
	__u64 skb[ROW]; /* 0: free */
};

struct keys fl_keys[1 << ROW_BITS]; /* no map of its own: a row is one line of memory then */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ROW << ROW_BITS);
	__type(key, __u32);
	__type(value, struct stamp);
} fl_stamps SEC(".maps");

/* When a packet was cut up last, in jiffies: for so many, pieces look for its stamp. */
#define SPLIT_JIFFIES 1024
__u64 fl_split_at;

/* One packet, as user space is told of it. */
#define RECORD 0
#define AT_SOCKET 1      /* what the socket adds to the record of the same id, */
#define AT_APPLICATION 2 /* and what its reader adds */
struct record {
	__u64 at; /* ns; when it was over */
	__u64 id; /* of the packet */
	__u64 stage[STAGES]; /* ns; NONE: not known */
	__u64 mace; /* ns between the application and the uplink; NONE: not known */
	struct flow flow;
	__u32 slot;
	__u8 direction;
	__u8 kind;
	__u8 awaits; /* AWAITS_*: what may follow */
	__u8 pad[5];
};
_Static_assert(sizeof(struct record) == 152, "read by records.go");
#define NONE (~0ULL)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} fl_records SEC(".maps");

/* Records for which fl_records had no room, or beyond MOST_TOLD. */
__u64 fl_lost;

struct cpu {
	__u64 key; /* see address() */
	__u64 jiffy;   /* for which now is a clock that costs nothing */
	__u32 skip;    /* packets to pass over before the next one is taken */
	__u32 gap;     /* how many that is in the mean, and one */
	__u32 begun;   /* in the window */
	__u32 reserved;
	__u64 passed;  /* events of packets that were passed over */
	__u64 before;  /* passed, when the window began */
	__u64 now;     /* ns */
	__u64 window;  /* when it began, ns */
	__u64 evicted; /* stamps of packets that were nobody's yet */
	/* The packet that this CPU brings to a socket, if one gets it. */
	__u64 since; /* at the container's device; 0: none */
	__u64 began; /* at the uplink */
	__u64 id;
	__u32 slot; /* 0: nobody's yet: of a tenant in fl_cgroups, if any */
	__u32 ifindex;
	__u32 len;
	__u8 protocol;
	__u8 traced;
	__u16 pad;
	__u64 polled; /* at the uplink, of a packet without a slot */
	__u32 wait;   /* the same: struct stamp */
	__u32 pad2;
	__u64 head;   /* the address of its bytes */
	__u32 check;
	__u32 worked; /* the event that is looked at has a stamp */
	struct flow flow;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu);
} fl_cpus SEC(".maps");
