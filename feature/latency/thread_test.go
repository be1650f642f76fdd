package latency

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// What waits for the thread that polls a container's device, on a CPU that has other work,
// shows in the stage before that device, and in no other of the same packet.
func TestThread(t *testing.T) {
	testkit.NeedRoot(t)
	h := newHost(t)
	h.bridge()
	web, c := h.add("web", "10.66.0.2/24", h.ns)
	h.measure(true, c)
	others, err := sched.Threads("/proc", "napi/eth0")
	must(t, err)
	outside, inside := h.Open(h.ns), h.Open(web)
	dev := c.Interfaces[0]
	// So a veth polls.
	must(t, inside.Offload(dev.Index, netdev.GRO).Write(netdev.GRO.On()))
	must(t, outside.Offload(dev.Host.Index, netdev.TSO).Write(netdev.Off))
	must(t, inside.Threaded(dev.Index).Write("1"))

	var one unix.CPUSet
	allowed, err := cpus()
	must(t, err)
	one.Set(allowed)
	threads := 0
	h.await(func() string {
		list, err := sched.Threads("/proc", "napi/eth0")
		must(t, err)
		for _, th := range list {
			if slices.Contains(others, th) {
				continue
			}
			must(t, unix.SchedSetaffinity(th.TID, &one))
			must(t, unix.SchedSetAttr(th.TID, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0))
			threads++
		}
		if threads == 0 {
			return fmt.Sprintf("no thread polls eth0: %+v", list)
		}
		return ""
	})
	hog, _ := h.add("hog", "10.66.0.4/24", h.ns)
	hc := h.Describe(hog)
	h.f.cfg.Containers = listed{hc}
	h.Load(hog, []int{allowed}, "burn")

	h.Load(web, nil, "udp-recv", "--listen", "10.66.0.2:9000")
	h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000", "--rate", "100", "--size", "64")
	filter := api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}
	var missing string
	h.await(func() string {
		got, _, err := h.f.Trace(t.Context(), c.ID, false, filter, maxRecords, time.Second)
		must(t, err)
		filter.After = got.Next
		var longest Record
		for _, r := range got.Records {
			if r.Direction != Ingress {
				continue
			}
			waited := r.Stages[Deliver]
			if waited >= 2*time.Millisecond && r.Stages[Added]-waited < time.Millisecond {
				for _, w := range r.waits {
					by := h.f.attribution().wire(w, Ingress, []container.ID{c.ID}).By
					if w.stage == Deliver && len(by) > 0 && by[0].Container == api.ID(hc.ID) && by[0].Work == api.LatencyTasks && !by[0].Own {
						return ""
					}
					missing = fmt.Sprintf("%+v", by)
				}
			}
			if waited > longest.Stages[Deliver] {
				longest = r
			}
		}
		return fmt.Sprintf("no packet has waited for the thread alone; of %d the longest: %v; the last wait was for %s", len(got.Records), longest.Stages, missing)
	})
}

// cpus gives a CPU on which this process may run.
func cpus() (int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, err
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("this process may run nowhere")
}

// listed knows these containers.
type listed []container.Container

func (l listed) Running() []container.Container { return l }

func (l listed) Lookup(id container.ID) (container.Container, bool) {
	for _, c := range l {
		if c.ID == id {
			return c, true
		}
	}
	return container.Container{}, false
}
