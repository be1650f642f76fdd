package netcpu_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/probe"
	"github.com/fairlead-project/fairlead/kernel/sched"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

// A container that gets a quota while it has a queue loses the queue if the quota does not stop its
// thread, and gets one again without the quota. If it ends after the uplink has recreated its
// queues, its changes are still undone.
func TestQueueOfAnEndedThread(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	throttled, err := probe.KthreadsThrottled(kernel.Default())
	must(t, err)
	h := newHost(t, sandbox.CPU{})
	h.needNAPIs()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	h.start(h.box, "udp-recv")
	h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", worth())
	h.untilThreads("one container's packets alone", payer(h.container), h.uplinkGroup())
	if !throttled {
		must(t, h.box.Limit(sandbox.CPU{Quota: 80 * time.Millisecond, Period: 100 * time.Millisecond}))
		h.untilThreads("with a quota over two CPUs", h.uplinkGroup(), h.uplinkGroup())
		must(t, h.box.Limit(sandbox.CPU{Quota: -1}))
		h.untilThreads("without a quota again", payer(h.container), h.uplinkGroup())
	}
	was := h.polling("nic0")
	h.Change(h.ns, "nic0", (*netlink.Handle).LinkSetDown)
	until(t, "the threads of nic0 end", func() bool {
		return !slices.ContainsFunc(was, func(th sched.Thread) bool { now, err := sched.Find("/proc", th.TID); return err == nil && now == th })
	})
	h.remove(h.container)
	h.Change(h.ns, "nic0", (*netlink.Handle).LinkSetUp)

	// The namespace is another container's now, which is isolated like the first one.
	next := h.create(sandbox.Spec{Name: "next", Network: h.box})
	c := h.describe(next)
	h.apply(c, policy.NetCPUIsolate)
	h.pays("isolated", c)
	must(t, h.netcpu.Remove(t.Context(), c.ID))
}

// restart sets a device down and up.
func restart(b *sandbox.Box, dev string) error {
	return errors.Join(b.Change(dev, (*netlink.Handle).LinkSetDown), b.Change(dev, (*netlink.Handle).LinkSetUp))
}

// Recreated NAPIs of a device have new threads, in the root group: these are placed again, at the
// container and at the uplink. Threads that somebody switches off come back.
func TestThreadsMadeAnew(t *testing.T) {
	testkit.InFull(t)
	t.Parallel()
	h := newHost(t, sandbox.CPU{})
	before := h.state()
	must(t, h.netcpu.Apply(t.Context(), h.target(policy.NetCPUIsolate)))
	inside := h.Open(h.box)
	gro := inside.Offload(h.Index(h.box, "eth0"), netdev.GRO)
	for _, made := range []struct {
		what, device string
		anew         func() error
	}{
		{"link down and up in the container", "eth0", func() error {
			return restart(h.box, "eth0")
		}},
		{"GRO off and on in the container", "eth0", func() error {
			return errors.Join(gro.Write(netdev.Off), gro.Write(netdev.GRO.On()))
		}},
		{"GRO off in the container", "eth0", func() error { return gro.Write(netdev.Off) }},
		{"link down and up at the uplink", "nic0", func() error {
			return restart(h.ns, "nic0")
		}},
		{"no threads in the container", "eth0", func() error { return inside.Threaded(h.Index(h.box, "eth0")).Write("0") }},
		{"no threads at the uplink", "nic0", func() error { return h.Open(h.ns).Threaded(h.Index(h.ns, "nic0")).Write("0") }},
	} {
		was := h.polling(made.device)
		must(t, made.anew())
		want := map[string][]string{"eth0": {payer(h.container)}, "nic0": {h.uplinkGroup(), h.uplinkGroup()}}[made.device]
		until(t, made.what, func() bool {
			ended := !slices.ContainsFunc(h.polling(made.device), func(th sched.Thread) bool { return slices.Contains(was, th) })
			// They reach their groups before they get their slice, which threads checks.
			return ended && h.hastened(made.device, len(want)) && slices.Equal(h.threads()[made.device], want)
		})
	}

	h.remove(h.container)
	same(t, "after Remove", h.state(), before)
}

// hastened reports whether this many threads of a device have their slice, which is set last, if
// the kernel has slices.
func (h *host) hastened(device string, want int) bool {
	n := 0
	for _, th := range h.polling(device) {
		slice, err := sched.Slice("/proc", th).Read()
		if err == nil && (slice == sched.NoSlice || slice == sched.FormatSlice(100*time.Microsecond)) {
			n++
		}
	}
	return n >= want // an older kernel may have kept a thread
}

const cpu1 = "/sys/devices/system/cpu/cpu1/online"

// hotplug returns the switch of CPU 1. It skips t if that cannot be done, and restores everything
// that the kernel changes for it: on cgroup v1 a cpuset does not get a CPU back by itself.
func hotplug(t *testing.T) func(on bool) {
	t.Helper()
	testkit.NeedRoot(t)
	if on, err := os.ReadFile(cpu1); err != nil || strings.TrimSpace(string(on)) != "1" {
		testkit.Skip(t, "CPU 1 cannot be taken offline")
	}
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	type cpuset struct{ file, cpus string }
	var sets []cpuset // parents first
	if layout.CPUSet != "" && layout.CPUSet != layout.V2 {
		must(t, filepath.WalkDir(layout.CPUSet, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // it has ended
			}
			file := filepath.Join(path, "cpuset.cpus")
			if text, err := os.ReadFile(file); err == nil {
				sets = append(sets, cpuset{file, strings.TrimSpace(string(text))})
			}
			return nil
		}))
	}
	write := func(on bool) error {
		value := "0"
		if on {
			value = "1"
		}
		return os.WriteFile(cpu1, []byte(value), 0)
	}
	t.Cleanup(func() {
		if err := write(true); err != nil {
			t.Errorf("CPU 1 stays offline: %v", err)
		}
		for _, s := range sets {
			now, err := os.ReadFile(s.file)
			if err != nil || strings.TrimSpace(string(now)) == s.cpus {
				continue
			}
			if err := os.WriteFile(s.file, []byte(s.cpus), 0); err != nil {
				t.Errorf("cpuset stays at %s: %v", now, err)
			}
		}
	})
	return func(on bool) {
		t.Helper()
		if err := write(on); err != nil && !on {
			testkit.Skip(t, "CPU 1 cannot be taken offline")
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestHotplug takes a CPU offline and online again, with accounting and charging of packets in
// progress. The accounts go on and add up, threads stay where they belong, and the end is as on any
// other host.
func TestHotplug(t *testing.T) {
	testkit.InFull(t)
	rounds := testkit.Scale(t, 1, 3)
	for _, mode := range testkit.Cases(t, 1, policy.NetCPUIsolate, policy.NetCPUCharge) {
		t.Run(string(mode), func(t *testing.T) {
			cpu := hotplug(t)
			h := newHost(t, sandbox.CPU{Quota: 50 * time.Millisecond, Period: 100 * time.Millisecond})
			// Softirqs run on the CPU that goes offline.
			must(t, h.ns.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "2" }))
			before := h.state()
			h.apply(h.container, mode)
			got := h.start(h.box, "udp-recv", "--listen", ":9000")
			h.start(h.wire, "udp-send", "--to", "10.66.0.2:9000", "--rate", "5000")
			check := func(when string) {
				t.Helper()
				from := h.addsUp(when)
				was := got.Read()
				until(t, when+", packets arrive", func() bool { return got.Read().Since(was).Ops > enough(1000) })
				until(t, when+", they are accounted for", func() bool { return h.accounts()[h.container.ID] > of(from, h).CPU() })
				now := h.addsUp(when)
				for _, a := range from.Accounts {
					i := slices.IndexFunc(now.Accounts, func(b account.Account) bool { return b.Container == a.Container })
					if i < 0 || now.Accounts[i].CPU() < a.CPU() {
						t.Errorf("%s: an account went back: %+v, now %+v", when, a, now.Accounts)
					}
				}
				if mode != policy.NetCPUIsolate {
					return
				}
				h.pays(when, h.container)
				for _, group := range h.threads()["nic0"] {
					group, _, _ = strings.Cut(group, " with ") // one that moves just now
					if group != h.uplinkGroup() && group != payer(h.container) {
						t.Errorf("%s: a thread of nic0 is in %s", when, group)
					}
				}
			}
			check("at first")
			for range rounds {
				cpu(false)
				check("without CPU 1")
				h.apply(h.container, mode)
				check("without CPU 1, applied again")
				cpu(true)
				check("with CPU 1 again")
			}
			h.apply(h.container, mode)
			check("applied again")
			must(t, h.netcpu.Remove(t.Context(), h.container.ID))
			same(t, "in the end", h.state(), before)
			if left := h.notes(); len(left) != 0 || len(h.threads()) != 0 {
				t.Errorf("in the end: threads %v, journal %+v", h.threads(), left)
			}
		})
	}
}

// of returns the account of the host's container in a reading.
func of(r account.Reading, h *host) account.Account {
	for _, a := range r.Accounts {
		if a.Container == h.container.ID {
			return a
		}
	}
	return account.Account{}
}
