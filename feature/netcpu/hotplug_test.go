package netcpu_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/feature/netcpu/account"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
)

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
				if where := h.threads()["eth0"]; len(where) != 1 || where[0] != payer(h.container) {
					t.Errorf("%s: the thread of eth0 is in %q, want %s", when, where, payer(h.container))
				}
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
