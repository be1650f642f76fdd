/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The maps of drop.bpf.c, in addition to those of charges.h and fate.h. */

/* Slots of tenants that can be isolated, from 1. */
#define MAX_TENANTS 4096
/* Addresses of all tenants. A single tenant may have any number. */
#define MAX_ADDRESSES 16384

/* The size of a veth's ring: VETH_RING_SIZE, drivers/net/veth.c. */
#define RING 256

/*
 * While a tenant's packets are dropped, one packet per this time passes. If the count is
 * wrong, the poll that this packet causes corrects it; so an error costs a millisecond
 * and never blackholes a tenant.
 */
#define RETRY_NS 1000000LL

/*
 * How long a poll with a used-up quota counts for its thread. The thread polls at least
 * once in RETRY_NS; without a poll, packets pass again.
 */
#define STOPPED_NS (10 * RETRY_NS)

/*
 * A container that may not run leaves its packets in its ring, and loses packets once
 * that is full. So this many packets pass while its quota or limit is used up: each time
 * that begins, and again after this time, the usual period of a quota.
 */
#define WAIT_NS 100000000LL

/*
 * An address belongs to a tenant if packets for it were seen on their way into the
 * tenant's veth within this time; the entry is touched once in a tenth of it.
 */
#define LEARNT_NS 1000000000LL

struct tenant {
	__u64 sent;    /* packets passed to the veth's ring */
	__u64 polled;  /* packets taken from it, or written off */
	__u64 dropped; /* packets that were dropped early, */
	__u64 beyond;  /* and the part of them while its quota or limit was used up */
	__u64 retried; /* when a packet last passed instead of being dropped, ns */
	__u64 stopped; /* when its thread last polled with its quota used up, ns */
	__u64 small;   /* packets on the way into the veth: single ones, */
	__u64 super;   /* and super-packets (GSO) */
	/*
	 * Set by user space. Once its charges in fl_charges reach limit, the tenant has
	 * used up its budget for this period; until is when limit lapses, ns.
	 */
	__s64 limit;
	__u64 until;
	__u64 waiting; /* packets that passed since its quota or limit was used up, */
	__u64 waits;   /* when that was found, ns; 0: it is not used up */
	__u32 account; /* slot in fl_charges of the account that limit is for */
	__u32 no_ring; /* its packets do not go through the ring, so that nothing */
		       /* waits there: softirqs handle them */
	__u64 intruding; /* the part of small that came in the time of a third party */
	__u64 arrived;	 /* packets that came by an uplink, */
	__u64 held;	 /* and the part of them that was dropped there */
	/*
	 * Set by user space: from uplinks a packet passes each gap ns, and up to a ring of
	 * them at once after a pause. next is when the next one may pass, ns; until
	 * paced_until, ns. A gap of 0 lets all pass.
	 */
	__u64 gap;
	__u64 next;
	__u64 paced_until;
};

MAP(fl_tenants, ARRAY, MAX_TENANTS, __u32, struct tenant);

_Static_assert(sizeof(struct tenant) == 152, "read by drops.go");

/* At 0, the packets that came by uplinks for no tenant: too many for one counter of all CPUs. */
MAP(fl_others, PERCPU_ARRAY, 1, __u32, __u64);

/*
 * A tenant's end of a veth -> slot of the tenant. Polls of that end take packets out of
 * the ring. By device, because other devices of a tenant (a NIC of its own, a tun) poll,
 * too.
 */
SPARSE(fl_counted, FL_MAX_DEVICES, struct fl_device, __u32);

/*
 * At 0, package account's program that charges a packet dropped by XDP to the tenant and
 * ends the packet itself. Empty without accounts.
 */
MAP(fl_charger, PROG_ARRAY, 1, __u32, __u32);

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
 * Address -> tenant. It is learnt from the packets that the host really sends into a
 * veth, since a container can give itself any address and must not cause drops of
 * another's packets by that. Only frames to the device's own MAC address teach: a bridge
 * that does not know where a receiver is, or was deceived, sends its frames to others
 * too. An address with frames to two tenants is dropped for neither. A neighbour on the
 * bridge can write any IP address into a frame, so only the host's routes show that the
 * host routes an address to the tenant.
 */
MAP(fl_addresses, LRU_HASH, MAX_ADDRESSES, struct fl_address, struct owner);

/* Devices of tunnels in the host's namespace. */
#define MAX_TUNNELS 1024

/*
 * Address of a tunnel's device, in the low six bytes as it is in memory -> 1. The host
 * routes what comes out of a tunnel to this address. User space creates the entries.
 */
SPARSE(fl_tunnels, MAX_TUNNELS, __u64, __u8);

/* Receive queues of uplinks that are watched. */
#define MAX_QUEUES 4096

/*
 * Counts the packets of one receive queue of an uplink by tenant. If all packets of a
 * queue are one tenant's, the queue can be polled at that tenant's expense.
 */
struct queue {
	__u64 own;    /* packets for the same tenant as the previous one */
	__u64 others; /* packets for another tenant than the previous one */
	__u64 stale;  /* packets to an address that had a tenant before a pause */
	__u32 slot;   /* tenant of the last packet; NOBODY: no isolated tenant */
	__u32 pad;
};

_Static_assert(sizeof(struct queue) == 32, "read by queue.go");

#define NOBODY 0xffffffff
#define STALE 0xfffffffe

/* NAPI id of the queue -> queue. User space creates the entries. */
SPARSE(fl_queues, MAX_QUEUES, __u32, struct queue);
