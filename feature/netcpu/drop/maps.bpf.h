/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The maps of drop.bpf.c, beside those of charges.h and fate.h, and what is in them. */

/* Slots of tenants that can be isolated, from 1. */
#define MAX_TENANTS 4096
/* Their addresses, of which a tenant may have any number. */
#define MAX_ADDRESSES 16384

/* VETH_RING_SIZE, drivers/net/veth.c: what a veth holds before it drops. */
#define RING 256

/*
 * While a tenant is dropped, one packet per this time passes all the same. If
 * the count were wrong, the poll that this packet causes sets it right; so a
 * mistake costs a millisecond and never blackholes anybody.
 */
#define RETRY_NS 1000000LL

/*
 * How long a thread is taken for one whose group has used up its quota after a
 * poll that saw so. It polls at least once in RETRY_NS; without a poll, packets
 * pass again.
 */
#define STOPPED_NS (10 * RETRY_NS)

/*
 * A container that may not run leaves its packets in its ring, and loses them once that
 * is full. So as many pass while its quota or its limit is used up: each time that
 * begins, and again after this time, the usual period of a quota.
 */
#define WAIT_NS 100000000LL

/*
 * An address counts as a tenant's while packets for it were seen on their way
 * into the tenant's veth, not longer ago than this; the entry is touched once
 * in a tenth of it.
 */
#define LEARNT_NS 1000000000LL

struct tenant {
	__u64 sent;    /* packets handed to the veth's ring */
	__u64 polled;  /* packets taken from it, or written off */
	__u64 dropped; /* packets that were dropped early, */
	__u64 beyond;  /* and those of them while its quota or limit was used up */
	__u64 retried; /* when one last passed that would have been dropped, ns */
	__u64 stopped; /* when its thread last polled though its quota was used up, ns */
	__u64 small;   /* packets on the way into the veth: single ones, */
	__u64 super;   /* and super-packets (GSO) */
	/*
	 * Set by user space. Beyond limit in fl_charges the tenant has used up
	 * what it may have of this period; until says when that lapses, ns.
	 */
	__s64 limit;
	__u64 until;
	__u64 waiting; /* packets that passed since its quota or limit was used up, */
	__u64 waits;   /* which was found then, ns; 0: it is not */
	__u32 account; /* whose charges limit is of, by the slot in fl_charges */
	__u32 no_ring; /* its packets do not go through the ring, so that nothing */
		       /* waits there: super-packets, or no thread of its own */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_TENANTS);
	__type(key, __u32);
	__type(value, struct tenant);
} fl_tenants SEC(".maps");

_Static_assert(sizeof(struct tenant) == 104, "read by tenant.go");

/*
 * A tenant's end of a veth, from whose polls it is known what has left the ring -> slot of
 * the tenant. By device, as other devices of a tenant (a NIC of its own, a tun) poll, too.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FL_MAX_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct fl_device);
	__type(value, __u32);
} fl_counted SEC(".maps");

/*
 * What charges a packet that XDP drops to whom it was dropped for, of package
 * account, at 0. It ends the packet itself. Empty without accounts.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} fl_charger SEC(".maps");

struct owner {
	__u64 seen;      /* ns */
	__u64 contested; /* when another tenant last got packets for it, ns; 0: never */
	__u32 slot;
	__u8 mac[6];     /* of the tenant's device */
	__u8 routed;     /* the host routes packets for it there, too */
	__u8 pad[5];
};

_Static_assert(sizeof(struct owner) == 32, "read by drop_test.go");

/*
 * Address -> tenant. It is learnt from what the host really sends into a veth,
 * since a container can give itself any address and must not have another's
 * packets dropped by that. Only frames to the device's own address teach, as a
 * bridge that does not know where somebody is, or was told lies about it, sends
 * what is for him to others too. What goes to two tenants is dropped for neither.
 * A neighbour on the bridge can write any IP address into a frame: that the host
 * routes an address to the tenant is told by the host's routes alone.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_ADDRESSES);
	__type(key, struct fl_address);
	__type(value, struct owner);
} fl_addresses SEC(".maps");

/* Receive queues of uplinks that are watched. */
#define MAX_QUEUES 4096

/*
 * Whose packets come by one receive queue of an uplink. A queue whose packets
 * are all one tenant's can be polled at that tenant's expense.
 */
struct queue {
	__u64 own;    /* packets for the same tenant as the one before */
	__u64 others; /* packets for somebody else than the one before */
	__u64 stale;  /* packets to an address that was a tenant's a while ago */
	__u32 slot;   /* whose the last one was; NOBODY: no isolated tenant's */
	__u32 pad;
};

_Static_assert(sizeof(struct queue) == 32, "read by queue.go");

#define NOBODY 0xffffffff
#define STALE 0xfffffffe

/* The id of the NAPI that polls the queue -> queue. User space makes them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_QUEUES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct queue);
} fl_queues SEC(".maps");
