package netcpu

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/feature/netcpu/auto"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// ErrNoAccounts reports that the kernel cannot keep accounts. Meters wrap it.
var ErrNoAccounts = errors.New("network CPU time is not accounted for")

// meter charges the CPU time of packets to containers. *account.Meter is one.
type meter interface {
	// Read returns all counters since the meter was made. Errors: ErrNoAccounts.
	Read() (account.Reading, error)
}

// noMeter is the meter and the accountant where the kernel cannot keep accounts.
type noMeter struct {
	why error
	who *identity.Identity // still lists the containers, which other features look up there
}

func (m noMeter) Read() (account.Reading, error) {
	return account.Reading{}, fmt.Errorf("netcpu: %w: %w", ErrNoAccounts, m.why)
}

func (m noMeter) Watch(c identity.Member) error {
	_, err := m.who.Tell(name, c)
	return err
}

func (m noMeter) Forget(id container.ID) error { return m.who.Forget(name, id) }

func (m noMeter) Demand(account.Need) error { return nil }

func (m noMeter) Room() int { return math.MaxInt }

// Accounts reads the accounts of network CPU time for the report, the metrics page, the containers'
// own view and the decisions of the mode auto. Each Netcpu has one.
type Accounts struct {
	Meter      meter
	Containers feature.Containers
	Since      time.Time // when Meter began to count
	Proc       string    // procfs, to read threads; "": no threads are read

	// InForce returns the measures in force beside accounting, for the report. It may be nil.
	InForce func() inForce

	used  usages
	modes auto.Chooser // of Adopt and Decide

	exporting sync.Mutex // one Export at a time; guards pairs
	pairs     pairs
}

// PacketWork implements feature.Worker.
func (x *Accounts) PacketWork() (map[container.ID][]time.Duration, error) {
	r, err := x.Meter.Read()
	return r.ByCPU, err
}

// modeKey is the policy key of the mode in force.
const modeKey = "fairlead.netcpu"

// Adopt implements feature.Decider. An entry for a thread that was moved for a container shows that
// auto had isolated that container.
func (x *Accounts) Adopt(left []journal.Entry) (ds []policy.Decision) {
	const reason = "decided by an earlier agent, which was killed"
	for _, e := range left {
		id := container.ID(e.Owner.Container)
		if id == 0 || e.Ref.Kind != sched.KindKthread {
			continue
		}
		ds = append(ds, policy.Decision{
			Container: id, Key: modeKey, Value: string(policy.NetCPUIsolate), Expiry: e.Expiry,
			Instead: string(policy.NetCPUAuto + "|" + policy.NetCPUIsolate), Reason: reason, Since: e.When,
		})
		x.modes.Adopt(id, reason, e.When)
	}
	return ds
}

// Decide implements feature.Decider.
func (x *Accounts) Decide(targets []policy.Target, complete bool) (ds []policy.Decision, err error) {
	var left []policy.Target
	for _, t := range targets {
		if t.InForce() == policy.NetCPUAuto {
			left = append(left, t)
		}
	}
	if len(left) == 0 {
		x.modes.Next(account.Reading{}, nil, complete, x.nameOf)
		return nil, nil // skip the cost of reading the accounts
	}
	r, err := x.Meter.Read()
	if err != nil {
		return nil, err
	}
	for i, m := range x.modes.Next(r, left, complete, x.nameOf) {
		if m.Since.IsZero() {
			continue // there is no decision yet
		}
		ds = append(ds, policy.Decision{
			Container: m.Container, Key: modeKey, Value: string(m.Mode),
			Instead: string(left[i].Settings.NetCPU), Reason: m.Reason, Since: m.Since.UTC(),
		})
	}
	return ds, nil
}

// Urgent implements feature.Urgent.
func (n *Netcpu) Urgent() bool {
	return n.meter != nil && n.meter.Metering() && n.modes.Alarm(n.meter.Accounts)
}

func (x *Accounts) nameOf(id container.ID) string {
	if c, ok := x.Containers.Lookup(id); ok && c.Name != "" {
		return c.Name
	}
	return id.String()
}
