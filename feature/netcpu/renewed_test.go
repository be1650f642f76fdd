package netcpu_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
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
	testkit.Later(t)
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

	// Another container gets the namespace, and is isolated like the first one.
	next := h.Create(sandbox.Spec{Name: "next", Network: h.box})
	c := h.describe(next)
	h.apply(c, policy.NetCPUIsolate)
	h.pays("isolated", c)
	must(t, h.netcpu.Remove(t.Context(), c.ID))
}

// restart sets a device down and up.
func restart(b *sandbox.Box, dev string) error {
	return errors.Join(b.Change(dev, (*netlink.Handle).LinkSetDown), b.Change(dev, (*netlink.Handle).LinkSetUp))
}

// Settings that other processes change come back without a call of Apply, and the end restores the
// values that they wrote. Recreated NAPIs have new threads in the root cgroup, which are placed again.
// Threads that others switch off come back, and so do programs that others detach.
func TestPutBack(t *testing.T) {
	testkit.InFull(t)
	testkit.Later(t)
	t.Parallel()
	f := newFollower(t)
	inside, outside := f.Open(f.box), f.Open(f.ns)
	eth0, h0, nic0 := f.Index(f.box, "eth0"), f.Index(f.ns, "h0"), f.Index(f.ns, "nic0")
	layout, err := cgroup.Detect("/proc", "")
	must(t, err)
	gro := inside.Offload(eth0, netdev.GRO)
	write := func(k journal.Knob, value string) func() error { return func() error { return k.Write(value) } }
	mask := func(k journal.Knob) string {
		now, err := k.Read()
		must(t, err)
		return netdev.CPUMask([]int{0}, now)
	}
	weight, _ := cgroup.WeightKnob(f.uplinkGroup(), layout.CPU == layout.V2)
	theirs := map[string]string{"eth0 rps": mask(inside.RPS(eth0, 0)), "nic0 rps": mask(outside.RPS(nic0, 1)), "nic0 rfs": "32", "h0 tso": "tx-tcp-segmentation"}
	type change struct {
		what string
		by   func() error
	}
	changes := []change{
		{"RPS in the container", write(inside.RPS(eth0, 0), theirs["eth0 rps"])},
		{"RFS in the container", write(inside.RFS(eth0, 0), "32")},
		{"TSO towards the container", write(outside.Offload(h0, netdev.TSO), theirs["h0 tso"])},
		{"RPS at the uplink", write(outside.RPS(nic0, 1), theirs["nic0 rps"])},
		{"RFS at the uplink", write(outside.RFS(nic0, 1), theirs["nic0 rfs"])},
		{"weight of the uplinks' group", write(weight, "321")},
		{"link down and up in the container", func() error { return restart(f.box, "eth0") }},
		{"GRO off and on in the container", func() error { return errors.Join(gro.Write(netdev.Off), gro.Write(netdev.GRO.On())) }},
		{"GRO off in the container", write(gro, netdev.Off)},
		{"link down and up at the uplink", func() error { return restart(f.ns, "nic0") }},
		{"no threads in the container", write(inside.Threaded(eth0), "0")},
		{"no threads at the uplink", write(outside.Threaded(nic0), "0")},
	}
	thread := func(device string, knob func(sched.Thread) journal.Knob, value string) change {
		th := f.polling(device)[0]
		return change{fmt.Sprintf("%s of a thread of %s", knob(th).Ref().Kind, device), func() error { return knob(f.polling(device)[0]).Write(value) }}
	}
	slice := func(th sched.Thread) journal.Knob { return sched.Slice("/proc", th) }
	for _, device := range []string{"eth0", "nic0"} {
		for _, hierarchy := range []string{layout.CPU, layout.CPUSet} {
			group := sched.Group("/proc", layout, f.polling(device)[0], hierarchy)
			if now, err := group.Read(); hierarchy != "" && (err != nil || now != hierarchy) { // else it is there already
				changes = append(changes, thread(device, func(th sched.Thread) journal.Knob { return sched.Group("/proc", layout, th, hierarchy) }, hierarchy))
			}
		}
		if now, err := slice(f.polling(device)[0]).Read(); err == nil && now != sched.NoSlice {
			changes = append(changes, thread(device, slice, sched.FormatSlice(3*time.Millisecond)))
		}
	}
	changes = append(changes, thread("eth0", func(th sched.Thread) journal.Knob { return sched.Nice("/proc", th) }, "7"))
	attached := func() []link.ID {
		return append(f.Programs(f.ns, "h0", ebpf.AttachTCXEgress), f.Programs(f.ns, "nic0", ebpf.AttachTCXIngress)...)
	}
	inForce := func() string {
		all := fmt.Sprint(f.state(), f.threads(), len(attached()))
		for _, device := range []string{"eth0", "nic0"} {
			for _, th := range f.polling(device) {
				paths, _ := layout.OfPID("/proc", th.TID)
				nice, _ := sched.Nice("/proc", th).Read()
				all += fmt.Sprint("; ", device, " ", paths.CPUSet, " ", nice)
			}
		}
		now, err := weight.Read()
		must(t, err)
		flows, err := inside.RFS(eth0, 0).Read()
		must(t, err)
		return all + "; weight " + now + "; RFS in the container " + flows
	}
	for _, id := range attached() {
		changes = append(changes, change{"a program", func() error { return topology.Detach(id) }})
	}
	want := inForce()
	for _, c := range changes {
		began := time.Now()
		must(t, c.by())
		testkit.AwaitNone(t, func() string {
			f.again()
			if now := inForce(); now != want {
				return fmt.Sprintf("%s: %s\nwant %s", c.what, now, want)
			}
			return ""
		})
		t.Logf("%s: %v", c.what, time.Since(began).Round(10*time.Millisecond))
	}
	f.remove(f.container)
	for name, now := range f.state() {
		if want, turned := theirs[name]; turned && now != want {
			t.Errorf("in the end: %s is %q, want %q", name, now, want)
		}
	}
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

// TestHotplug takes a CPU offline and online again while packets are accounted for and charged. The
// accounts continue and add up, threads stay in their place, and the end is as on any other host.
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
				from, cost, was := h.addsUp(when), h.cost(h.container), got.Read()
				until(t, when+", packets arrive", func() bool { return got.Read().Since(was).Ops > enough(1000) })
				until(t, when+", they are accounted for", func() bool { return h.cost(h.container) > cost })
				now := h.addsUp(when)
				for id, a := range from.Accounts {
					if b, is := now.Accounts[id]; !is || b.CPU() < a.CPU() {
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
			h.noThreads("in the end")
		})
	}
}
