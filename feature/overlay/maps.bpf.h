/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps of overlay.bpf.c. Networks, tunnels, ends and uplinks are user space's; the three
 * caches are learnt here. Those of containers forget what was not used for longest.
 */

#include "map.h"

#define MAX_NETS 256
#define MAX_ENDS 8192
#define MAX_UPLINKS 256
#define MAX_REMOTES 32768
#define MAX_LOCALS 8192
#define MAX_FLOWS 65536

/* What is learnt counts this long, unless a packet that took the slow path proves it anew. */
#define LEASE_NS 700000000ULL /* below a second also where a sender waits for a CPU */
/* For how long after its lease an entry counts as one of the same connection. */
#define KEPT_NS 2000000000ULL
/* A flow that is younger in both is not worth learning: most connections end before. */
#define YOUNG_MS 10 /* more than a tick of the coarse clock */
#define YOUNG_PACKETS 31 /* after the first; with YOUNG_MS alone, up to 1,800 went slowly */
/* A note for fl_ov_uplink is read by the same CPU at once; the coarse clock is up to 10 ms late. */
#define NOTE_NS 20000000ULL
/* How often user space is asked for one flow; and again after so many bytes of TCP. */
#define ASK_NS 100000000ULL
#define ASK_BYTES (1 << 30)

#define NET_ON 1     /* the fast path may be used */
#define NET_ROUTED 4 /* the tunnel device has the route; else it is a port of a bridge */
#define NET_TOS 8    /* the outer header has the inner DSCP */
#define NET_LIBERAL 16 /* conntrack takes packets of TCP whatever it did not see */

/* A network: a tunnel device, and the host ends behind it. By its number, from 1. */
struct network {
	__u64 from;   /* nothing is learnt before, by the monotonic clock: a change is under way */
	__u32 gen;    /* what was learnt under another counts no more */
	__u32 flags;
	__u32 tunnel; /* index of the tunnel device in its namespace */
	__u32 word;   /* first word of the tunnel's header, in network order; tells VXLAN from Geneve */
	__u32 vni;    /* second word of it */
	__u16 port;   /* network order */
	__u16 mtu;    /* of the tunnel device */
	__u16 low;    /* range of outer source ports, as the kernel takes it */
	__u16 high;
	/*
	 * The pair that leads into the network's namespace, where that is not the uplinks';
	 * else 0. inside is the index of the end in there.
	 */
	__u32 inside;
	__u32 outside;
	__u32 pad;
};

MAP(fl_ov_nets, ARRAY, MAX_NETS, __u32, struct network);

/* What a tunnel's packets are known by -> number of the network. */
struct tunnel {
	__u32 vni;
	__u16 port;
	__u16 v6; /* the outer header is IPv6 */
};

MAP(fl_ov_tunnels, HASH, MAX_NETS, struct tunnel, __u32);

/* Until when user space vouches that it follows changes, in ns of the monotonic clock. */
MAP(fl_ov_beat, ARRAY, 1, __u32, __u64);

#define WAY_PEER 1 /* into the container at once, past the host end */
#define WAY_END 2  /* through the host end, where something has to see the packet */
#define WAY_OUT 4  /* what the container sends may be fast */

/* The host end of a container's veth. */
struct end_key {
	__u32 net;
	__u32 ifindex;
};

struct end {
	__u32 way;
	__u16 tenant;
	__u16 slot; /* in fl_ov_passed; 0: none */
	__u8 mac[6]; /* of the container's device */
	__u16 mtu;   /* the least of that device, of the host end, and of the bridge */
};

MAP(fl_ov_ends, HASH, MAX_ENDS, struct end_key, struct end);

/* By the index of an uplink. */
struct uplink {
	__u32 mtu;
	__u32 group; /* of uplinks that are next hops of the same routes; 0: alone */
};

MAP(fl_ov_uplinks, HASH, MAX_UPLINKS, __u32, struct uplink);

struct host_key {
	__u32 net;
	__u32 uplink; /* by which packets go to a container on another host */
	struct fl_address ip;
};

#define V4_HEADERS 64 /* Ethernet, IPv4, UDP, tunnel, inner Ethernet */
#define V6_HEADERS 84

/* Egress cache: a container on another host. */
struct remote {
	__u64 until;
	__u32 gen;
	struct host_key self; /* entries of an LRU map are used anew while they are read */
	__u16 mtu;	      /* of the way: of the uplink, the route, and what the path has told */
	__u16 bytes;	      /* of headers: V4_HEADERS or V6_HEADERS */
	__u16 summed;	      /* the outer UDP header has a checksum */
	__u8 headers[V6_HEADERS + 2]; /* aligned as in a packet: the IP header to a word */
};

MAP(fl_ov_remotes, LRU_HASH, MAX_REMOTES, struct host_key, struct remote);

/* Ingress cache: a container here. */
struct local {
	__u64 until;
	__u32 gen;
	__u32 ifindex; /* host end */
	__u32 way;
	__u16 tenant;
	__u16 slot;
	__u8 mac[6];	 /* of the container */
	__u8 gateway[6]; /* who sends what it receives: the bridge of a routed network */
	__u16 mtu;	 /* of its end */
	__u16 pad;
};

MAP(fl_ov_locals, LRU_HASH, MAX_LOCALS, struct host_key, struct local);

/* Filter cache: a flow that the slow path has let through. */
struct flow_key {
	__u32 net;
	struct fl_address local;
	struct fl_address remote;
	__u16 lport; /* network order */
	__u16 rport;
	__u32 proto;
};

enum direction { OUT, IN, DIRECTIONS };

struct seen {
	__u64 until;
	__u32 gen;
	__u32 alone; /* conntrack has seen the other direction */
	__u32 seq;   /* of TCP, when conntrack was last made ready */
	__u32 pad;
};

/*
 * What NAT makes of the other end of a packet: a backend of a service, or in what it answers, the
 * service. It is another flow's by now if the seal is not right.
 */
struct side {
	struct fl_address ip;
	__u16 port;
	__u16 pad;
	__u32 seal; /* 0: nothing is changed */
};

struct flow {
	struct seen dir[DIRECTIONS]; /* written each by its own direction's programs */
	__u32 ready; /* conntrack takes packets of this flow whatever it did not see; 1, or not tracked: 2 */
	__u32 end;   /* host end of the container that sends it, in a bridged network; routers do not tell */
	__u32 uplink; /* by which it is sent: a route may have several */
	__u32 slot;   /* in fl_ov_held, of the container's end */
	struct side to;
	__u64 learnt; /* when the entry was made */
	__u64 asked;
};

#define READY 1
#define UNTRACKED 2

/* User space deletes those that are over. Flows that are not are never forgotten for others'. */
MAP(fl_ov_flows, HASH, MAX_FLOWS, struct flow_key, struct flow);

/* How many flows an end has there, by its slot; at 0 those of all. User space counts them anew. */
MAP(fl_ov_held, ARRAY, MAX_ENDS, __u32, __s64);

/*
 * A small table in front of the large one, by a hash of the flow. Most connections end before
 * they are worth an entry, and what a look-up costs that has to go to memory: here is when a
 * flow without an entry was seen first, and until when any flow of this place may have a
 * lease.
 */
#define MAX_SIGHTS 16384

struct sight {
	__u32 tag;   /* of the flow that was seen last */
	__u32 first; /* when that was seen first, in ms by the coarse clock */
	__u16 dirs;  /* a bit for each direction in which it was seen */
	__u16 packets; /* of it that came after the first */
	__u32 until; /* ms; no flow of this place has an entry that counts later than this */
};

MAP(fl_ov_sights, ARRAY, MAX_SIGHTS, __u32, struct sight);

/* Flows for which user space shall make conntrack ready. A full one: asked again later. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} fl_ov_asks SEC(".maps");

/* What one program leaves for the next that this CPU runs for the same packet. */
struct note {
	__u64 sent;	/* when fl_ov_send began with it; 0: not timed */
	__u32 sent_net;
	__u32 sent_way; /* TIMED_FAST, TIMED_SLOW; 0: it has not shown yet that it goes into the tunnel */
	__u32 to;	/* to fl_ov_pair: the index to redirect to; 0: nothing */
	__u32 way;
	struct flow_key flow; /* to fl_ov_uplink: of the packet; net 0: nothing */
	struct flow_key entry; /* what is learnt of it: the same without NAT */
	__u64 at;
	__u64 socket; /* cookie of the packet's; 0: it has none */
	struct remote remote; /* scratch: what is learnt is too large for the stack */
};

MAP(fl_ov_notes, PERCPU_ARRAY, 1, __u32, struct note);

/* Why a packet takes the slow path. The names are in counts.go. */
enum reason {
	FAST,
	UNKNOWN_FLOW,
	LEASE,
	GENERATION,
	ONE_WAY,   /* not seen in the other direction */
	NOT_READY, /* conntrack is not ready, or asked for the first time */
	NO_LOCAL,
	NO_REMOTE,
	OFF,
	OPTIONS,
	FRAGMENT,
	TTL,
	MTU,
	PROTOCOL,
	TCP_FLAGS,
	HEADER,	  /* not the learnt one */
	SOURCE,	  /* outer addresses not those learnt */
	CHECKSUM, /* of the outer header: wrong, or not to be had */
	WAY,	  /* this end's packets may not be fast */
	CUT,	  /* lengths that contradict each other */
	ROOM,	  /* the kernel has no room for the headers */
	REASONS,
};

/* What a container's end has seen, by direction: fast, slow. */
struct passed {
	__u64 packets[DIRECTIONS][2];
	__u64 bytes[DIRECTIONS][2];
};

MAP(fl_ov_passed, PERCPU_ARRAY, MAX_ENDS, __u32, struct passed);

#define TIMED_FAST 1
#define TIMED_SLOW 2

/* One packet in so many, by chance, is timed from its host end to the uplink. */
#define TIMED_IN 64
#define TIMED_NS 1000000 /* what takes longer was interrupted */

struct counts {
	__u64 packets[DIRECTIONS][REASONS];
	__u64 bytes[DIRECTIONS][2]; /* fast, slow */
	__u64 timed[2]; /* packets sent: fast, slow */
	__u64 ns[2];	/* how long these took */
};

MAP(fl_ov_counts, PERCPU_ARRAY, MAX_NETS, __u32, struct counts);
