// Package account charges every nanosecond of network softirq to the container
// that caused it, and records which context lost that time (Iron, NSDI 2018, section 3.1).
// account.bpf.c does the work in the softirq. The Go part registers containers with it
// and reads the results.
//
// The package only measures: it affects neither scheduling nor packets. Packages
// ledger and netcpu act on the numbers. Package netcpu opens one Meter per host.
// docs/limits.md says which numbers are exact.
package account

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// System is the account of packets that belong to no container: packets for the
// host itself, ARP, packets without a recipient.
const System = container.ID(0)

// Protocol is a class of packets with a separate cost.
type Protocol int

// Encapsulated packets came through a tunnel of the host. The class covers the work
// up to decapsulation. The inner packet counts once more, under its own protocol.
const (
	UDP Protocol = iota
	TCP
	Encapsulated
	Other
	Protocols // the number of protocols
)

func (p Protocol) String() string {
	switch p {
	case UDP:
		return "udp"
	case TCP:
		return "tcp"
	case Encapsulated:
		return "encapsulated"
	}
	return "other"
}

// Work is the cost of packets of one kind. A packet is what the stack handles as one
// unit, however many frames it was on the wire.
type Work struct {
	CPU     time.Duration
	Packets uint64
	Bytes   uint64
}

// Account is the cost of one container's packets since Open.
type Account struct {
	Receive, Send [Protocols]Work
	// Own is the part of Receive and Send that ran in the time of the container's own
	// tasks, in NAPI threads that poll its devices, or in threads in its cgroup.
	Own time.Duration
	// Took is the part of Receive and Send that ran in the time of other tasks or ksoftirqd.
	Took time.Duration
	// Robbed is the time of the container's tasks that went into others' packets,
	// including peers'. Took and Robbed are exact even if the table of Thefts is full.
	Robbed time.Duration
}

// CPU is the sum of Receive and Send.
func (a Account) CPU() time.Duration { return works(a.Receive).CPU + works(a.Send).CPU }

// SendCPU is the sum of Send.
func (a Account) SendCPU() time.Duration { return works(a.Send).CPU }

// PartyKind is the kind of context that lost the time of a packet.
type PartyKind int

const (
	Task      PartyKind = iota // a task of a container, or of the host (Container 0)
	Ksoftirqd                  // the kernel's thread for softirqs
	Idle                       // an idle CPU
	NAPI                       // a thread that polls a device
	Peer                       // a task that had sent the packets itself: no theft
)

func (k PartyKind) String() string {
	switch k {
	case Task:
		return "task"
	case Ksoftirqd:
		return "ksoftirqd"
	case Idle:
		return "idle"
	case Peer:
		return "peer"
	}
	return "napi"
}

// Party is a context that loses time.
type Party struct {
	Container container.ID // 0: not a watched container
	Kind      PartyKind
}

// Pair is a theft: Victim lost time to packets of Culprit.
type Pair struct {
	Victim  Party
	Culprit container.ID // System: 0
}

// Own reports whether the victim is a context of the culprit itself.
func (p Pair) Own() bool {
	return p.Victim.Container == p.Culprit && (p.Victim.Kind == Task || p.Victim.Kind == NAPI)
}

// Loss reports whether another container, or a task of the host, lost the time. ksoftirqd, the
// host's NAPI threads, idle CPUs and the sender of the packets lose nothing.
func (p Pair) Loss() bool {
	return !p.Own() && (p.Victim.Kind == Task || p.Victim.Kind == NAPI && p.Victim.Container != 0)
}

// Reading is the state of all accounts at one moment. All numbers but Taken
// are sums since Open.
type Reading struct {
	Taken time.Time
	// Softirq is the time from softirq_entry to softirq_exit of NET_RX and NET_TX,
	// and of TASKLET, TIMER and HRTIMER when those did network work. It includes the
	// timer interrupt that raised the softirq, with the overhead around its handler
	// (see measureAround). Charges use the same intervals, so if Accounts add up to
	// Softirq, no interval is lost or charged twice. That does not show that an
	// interval has the right length or was charged to the right account.
	Softirq time.Duration
	Thread  time.Duration // polls of NAPI threads
	// Accounts has one entry for each container, one for System, and one for each
	// container that was forgotten since the last Read.
	Accounts map[container.ID]Account
	// ByCPU is the CPU time of Receive and Send of each account, by CPU number.
	ByCPU  map[container.ID][]time.Duration
	Thefts map[Pair]time.Duration // set by Read; Meter.Accounts omits it
	// Gone is the sum of the accounts that are no longer in Accounts. Softirq plus
	// Thread equals Accounts plus Gone.
	Gone time.Duration
	Lost uint64 // charges missing from Thefts because the table was full
}
