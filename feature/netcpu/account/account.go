// Package account charges every nanosecond of network softirq to the container
// that caused it, and notes whose time was taken (Iron, NSDI 2018, section
// 3.1). account.bpf.c does the work inside the softirq; this part tells it who
// is who, and reads it.
//
// It measures and has no effect on scheduling or on packets: what follows from
// the numbers is package ledger's and netcpu's business. Package agent or
// netcpu opens one Meter per host. LIMITS.md says what is exact and what is
// not.
package account

import (
	"time"

	"github.com/fairlead-project/fairlead/container"
)

// System is the account of what nobody can be charged for: packets for the
// host itself, ARP, what arrives for no one.
const System = container.ID(0)

// Protocol is a class of packets with a cost of its own.
type Protocol int

// Encapsulated packets are those that a tunnel of the host brought, for the
// work up to where they are unpacked; what is inside counts once more, by its
// own protocol.
const (
	UDP Protocol = iota
	TCP
	Encapsulated
	Other
	Protocols // how many there are
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

// Work is what packets of one kind have cost. A packet is one that the stack
// handles as one, however many the wire had of it.
type Work struct {
	CPU     time.Duration
	Packets uint64
	Bytes   uint64
}

// Account is what one container's packets have cost since Open.
type Account struct {
	Container     container.ID
	Receive, Send [Protocols]Work
	// Own is the part of Receive and Send that ran in the container's own
	// tasks' time, or in NAPI threads that poll its own devices or are in its
	// cgroup.
	Own time.Duration
	// Took is the part of them that ran in others' tasks' time or ksoftirqd's.
	Took time.Duration
	// Robbed is the time of the container's tasks in which others' packets were
	// handled. As Took it is exact where Thefts, of which there may be too many,
	// are not.
	Robbed time.Duration
}

// CPU is the sum of Receive and Send.
func (a Account) CPU() time.Duration {
	var sum time.Duration
	for i := range Protocols {
		sum += a.Receive[i].CPU + a.Send[i].CPU
	}
	return sum
}

// SendCPU is the sum of Send.
func (a Account) SendCPU() (sum time.Duration) {
	for _, w := range a.Send {
		sum += w.CPU
	}
	return sum
}

// PartyKind says in what the time was that a packet took.
type PartyKind int

const (
	Task      PartyKind = iota // of a container, or of the host (Container 0)
	Ksoftirqd                  // the kernel's thread for softirqs
	Idle                       // nobody wanted the CPU
	NAPI                       // a thread that polls a device
)

func (k PartyKind) String() string {
	switch k {
	case Task:
		return "task"
	case Ksoftirqd:
		return "ksoftirqd"
	case Idle:
		return "idle"
	}
	return "napi"
}

// Party is whose time was taken.
type Party struct {
	Container container.ID // 0: nobody's that is watched
	Kind      PartyKind
}

// Theft is the time that one container's packets took from somebody else.
type Theft struct {
	Victim  Party
	Culprit container.ID // System: 0
	CPU     time.Duration
}

// Reading is the state of all accounts at one moment. All numbers but Taken
// are sums since Open.
type Reading struct {
	Taken time.Time
	// Softirq is the time from softirq_entry to softirq_exit of NET_RX, NET_TX,
	// and of TASKLET, TIMER and HRTIMER where those did network work, with the
	// timer's interrupt that brought it and what that takes beyond its handler,
	// as measured once in a while. It is added up from the same intervals as the
	// charges: that Accounts come to it says that nothing is lost or charged twice,
	// not that it is right, nor of the right one.
	Softirq time.Duration
	Thread  time.Duration // polls of NAPI threads
	// Accounts has one for each tenant, one for System, and one for each
	// tenant that was forgotten since the last Read.
	Accounts []Account
	// ByCPU is the sum of Receive and Send of each account, by the number of the CPU.
	ByCPU  map[container.ID][]time.Duration
	Thefts []Theft // of Read; Accounts leaves them out
	// Gone is what the accounts had that are in Accounts no longer: Softirq and
	// Thread are the sum of Accounts and Gone.
	Gone time.Duration
	Lost uint64 // charges whose victim a full table could not note
}
