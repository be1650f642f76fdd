// Package knobs tests all pairs of features that turn knobs of one container, in all orders, with
// kills in between: at the end the host must be as before. The cgroups are files in a folder with
// the layouts of v1 and v2.
package knobs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/blockio"
	"github.com/fairlead-project/fairlead/feature/netcpu/isolate"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/journal"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var must = testkit.Must

// key is the policy for one container in one feature.
type key struct {
	name, feature string
	settings      policy.Settings
}

// keys returns the keys that turn knobs of a container's cgroup. The keys of traffic, latency and
// overlay turn knobs of devices, which no other feature does, or none.
func keys(disk string) []key {
	io := func(name string, s policy.Settings) key { return key{name, "blockio", s} }
	net := func(mode policy.NetCPU) key {
		return key{"netcpu=" + string(mode), "netcpu", policy.Settings{NetCPU: mode, NetCPUSteal: new(float64)}}
	}
	most := []policy.IO{{Device: disk, Max: policy.Figures{ReadIOPS: 70, WriteIOPS: 500}}}
	return []key{
		net(policy.NetCPUIsolate), net(policy.NetCPUCharge),
		io("io.yield=idle", policy.Settings{IOYield: policy.YieldIdle}),
		io("io.yield=quota", policy.Settings{IOYield: policy.YieldQuota}),
		io("io.max", policy.Settings{IO: most}),
		io("io.weight", policy.Settings{IOWeight: 50}),
		io("io.help=realtime", policy.Settings{IOHelp: policy.HelpRealtime, Realtime: 20 * time.Millisecond}),
		io("all of io", policy.Settings{IOYield: policy.YieldQuota, IO: most, IOWeight: 50, IOHelp: policy.HelpRealtime, Realtime: 20 * time.Millisecond}),
	}
}

// host is a container on a host, and an agent's features.
type host struct {
	root, state string // root holds the files that stand for cgroups
	roots       kernel.Roots
	v2          bool
	c           container.Container
	layout      cgroup.Layout
	journal     *journal.Journal
	blockio     *blockio.BlockIO
	isolator    *isolate.Isolator
	on          map[string]key // by feature
}

// open starts an agent, which finds the state of an earlier one.
func (h *host) open() (err error) {
	if h.journal, err = journal.Open(h.state, ""); err != nil {
		return err
	}
	if h.blockio, err = blockio.New(blockio.Config{Host: feature.Host{Roots: h.roots, Journal: h.journal, Containers: topology.Containers{h.c}}, Measures: func() error { return nil }}); err != nil {
		return err
	}
	h.isolator = isolate.New(isolate.Config{Feature: "netcpu", Tenants: tenant.New("/proc", tenant.Network), Journal: h.journal, Roots: h.roots, Layout: h.layout})
	return nil
}

// killed ends the agent without a shutdown and starts the next.
func (h *host) killed() error { return errors.Join(h.journal.Close(), h.open()) }

// apply puts a key in force. The zero key releases what the feature turned.
func (h *host) apply(k key) error {
	var err error
	if k.feature == "blockio" {
		if err = h.blockio.Apply(context.Background(), policy.Target{Container: h.c, Settings: k.settings}); errors.Is(err, feature.ErrPartly) {
			err = nil
		}
	} else {
		err = h.netcpu(k.settings.NetCPU)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", k.feature, k.name, err)
	}
	h.on[k.feature] = k
	return h.settle()
}

// netcpu does what feature netcpu does to the cgroup. It charges as package charge does; the
// package itself depends on the clock.
func (h *host) netcpu(mode policy.NetCPU) error {
	by := journal.Owner{Feature: "netcpu", Container: uint64(h.c.ID)}
	if mode != policy.NetCPUIsolate {
		if _, err := h.isolator.Release(context.Background(), nil, h.c.ID); err != nil {
			return err
		}
	}
	if mode != policy.NetCPUCharge {
		if _, err := h.journal.Restore(kernel.Opener(h.roots), func(e journal.Entry) bool { return e.Owner == by }); err != nil {
			return err
		}
		if mode == policy.NetCPUIsolate {
			_, err := h.isolator.Weigh(h.c)
			return err
		}
		return nil
	}
	dir := h.c.Cgroup.CPU
	b, _, err := cgroup.GivenBandwidth(h.journal, dir, h.v2)
	if err != nil {
		return err
	}
	until := time.Now().Add(time.Minute)
	if b.Limited {
		_, given := cgroup.Quota(dir, h.v2, b.Quota, b.Period)
		k, value := cgroup.Quota(dir, h.v2, b.Quota*9/10, b.Period)
		if err := h.journal.TurnGiven(k, given, value, by, until); err != nil {
			return err
		}
	}
	w, _, err := cgroup.GivenWeight(h.journal, dir, h.v2)
	if err != nil || w == 0 {
		return err
	}
	k, _ := cgroup.WeightKnob(dir, h.v2)
	return h.journal.TurnGiven(k, fmt.Sprint(w), fmt.Sprint(2*w), by, until)
}

var noLimit = regexp.MustCompile(`(?m)^\d+:\d+ (0|rbps=max wbps=max riops=max wiops=max)$`)

// settle makes the files change as the kernel would: it drops a line without a limit.
func (h *host) settle() error {
	for _, pattern := range []string{"io.max", "blkio.throttle.*"} {
		names, err := filepath.Glob(filepath.Join(h.c.Cgroup.IO, pattern))
		if err != nil {
			return err
		}
		for _, name := range names {
			data, err := os.ReadFile(name)
			if err == nil && noLimit.Match(data) {
				err = os.WriteFile(name, nil, 0o600)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// owners returns what the host's owner may have set: nothing, or lower limits than ours.
func owners(v2 bool, device string) []map[string]string {
	if v2 {
		plain := map[string]string{"cpu.weight": "100", "cpu.idle": "0", "cpu.max": "max 100000", "io.max": "", "io.weight": "default 100", "io.bfq.weight": "default 100"}
		strict := maps.Clone(plain)
		maps.Copy(strict, map[string]string{"cpu.weight": "321", "cpu.max": "40000 100000", "io.max": device + " rbps=max wbps=max riops=max wiops=50", "io.weight": "default 70"})
		return []map[string]string{plain, strict}
	}
	plain := map[string]string{
		"cpu.shares": "1024", "cpu.idle": "0", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000", "cpu.rt_runtime_us": "0", "cpu.rt_period_us": "1000000", "blkio.bfq.weight": "100",
		"blkio.throttle.read_iops_device": "", "blkio.throttle.write_iops_device": "", "blkio.throttle.read_bps_device": "", "blkio.throttle.write_bps_device": "",
	}
	strict := maps.Clone(plain)
	maps.Copy(strict, map[string]string{"cpu.shares": "900", "cpu.cfs_quota_us": "40000", "cpu.rt_runtime_us": "30000", "cpu.rt_period_us": "500000", "blkio.throttle.write_iops_device": device + " 50"})
	return []map[string]string{plain, strict}
}

// newHost creates the files of a container's cgroups, and of their ancestors.
func newHost(t *testing.T, v2 bool, files map[string]string) *host {
	t.Helper()
	root := t.TempDir()
	h := &host{root: root, state: filepath.Join(root, "state"), v2: v2, on: make(map[string]key)}
	h.roots = kernel.Roots{Proc: filepath.Join(root, "proc"), Sys: "/sys", Cgroup: root}
	unified := filepath.Join(root, "unified")
	h.layout = cgroup.Layout{V2: unified, CPU: unified, IO: unified}
	mounts, controllers := fmt.Sprintf("30 1 0:26 / %s rw - cgroup2 cgroup2 rw\n", unified), "cpu io"
	if !v2 {
		h.layout.CPU, h.layout.IO, controllers = filepath.Join(root, "cpu"), filepath.Join(root, "blkio"), ""
		for i, name := range []string{"cpu", "blkio"} {
			mounts += fmt.Sprintf("3%d 1 0:3%d / %s rw - cgroup cgroup rw,%s\n", i+1, i, filepath.Join(root, name), name)
		}
	}
	testkit.Write(t, filepath.Join(root, "proc/self/mountinfo"), mounts)
	testkit.Write(t, filepath.Join(unified, "cgroup.controllers"), controllers)
	h.c = container.Container{ID: 7, Name: "web", Cgroup: container.Cgroup{
		V2: filepath.Join(unified, "pods/web"), CPU: filepath.Join(h.layout.CPU, "pods/web"), IO: filepath.Join(h.layout.IO, "pods/web"),
	}}
	for _, dir := range []string{h.c.Cgroup.V2, h.c.Cgroup.CPU, h.c.Cgroup.IO} {
		for _, dir := range []string{dir, filepath.Dir(dir)} {
			for _, name := range []string{"cgroup.procs", "cgroup.threads", "tasks"} {
				testkit.Write(t, filepath.Join(dir, name), "")
			}
		}
	}
	for name, text := range files {
		dir := dirOf(h.c.Cgroup, name)
		testkit.Write(t, filepath.Join(dir, name), text)
		if strings.HasPrefix(name, "cpu.rt_") {
			testkit.Write(t, filepath.Join(filepath.Dir(dir), name), text)
		}
	}
	return h
}

// dirOf returns the cgroup directory that has a file.
func dirOf(cg container.Cgroup, name string) string {
	if strings.HasPrefix(name, "io.") || strings.HasPrefix(name, "blkio.") {
		return cg.IO
	}
	return cg.CPU
}

// files returns the content of all files: of the container's cgroups and of their ancestors.
func (h *host) files(t *testing.T) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for name := range owners(h.v2, "0:0")[0] {
		for dir := dirOf(h.c.Cgroup, name); len(dir) > len(filepath.Dir(h.layout.V2)); dir = filepath.Dir(dir) {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			all[filepath.Join(dir, name)] = strings.TrimSpace(string(data))
		}
	}
	return all
}

// same fails the test unless the host is as it was and the journal is empty.
func (h *host) same(t *testing.T, when string, was map[string]string) {
	t.Helper()
	if diff := cmp.Diff(was, h.files(t)); diff != "" {
		t.Fatalf("%s: %s", when, diff)
	}
	if left := h.journal.Entries(); len(left) > 0 {
		t.Fatalf("%s: left in the journal: %+v", when, left)
	}
}

// aDisk returns a disk of this host.
func aDisk(t *testing.T) block.Disk {
	t.Helper()
	disks, err := block.Disks("/sys")
	must(t, err)
	for _, d := range disks {
		if _, err := os.Stat("/dev/" + d.Name); err == nil {
			return d
		}
	}
	testkit.Skip(t, "no disk")
	return block.Disk{}
}

// TestPairs puts two keys in force and releases them, in each order, and kills the agent after one
// of the steps. Then the next agent applies its targets again, or `fairlead restore` runs.
func TestPairs(t *testing.T) {
	testkit.NeedRoot(t)
	disk := aDisk(t)
	all := keys("/dev/" + disk.Name)
	const never, last = -1, 3
	turn := 0
	for _, v2 := range []bool{false, true} {
		for n, files := range owners(v2, disk.Number()) {
			h := newHost(t, v2, files)
			must(t, h.open())
			was := h.files(t)
			for _, a := range all {
				for _, b := range all {
					if v2 && (a.settings.Realtime > 0 || b.settings.Realtime > 0) {
						continue // it sets deadlines of threads, and there are none here
					}
					for _, order := range [][]key{{a, b, {feature: a.feature}, {feature: b.feature}}, {a, b, {feature: b.feature}, {feature: a.feature}}} {
						// Each pair is killed once in each order. The step of the kill rotates.
						for _, kill := range []int{never, turn / 2 % (last + 1)} {
							restored := turn%2 == 0
							when := fmt.Sprintf("v2 %v, owner %d: %s, %s, let go of %s first, killed after step %d, restore %v", v2, n, a.name, b.name, order[2].feature, kill, restored)
							h.run(t, when, order, kill, restored)
							h.same(t, when, was)
							turn++
						}
					}
				}
			}
			must(t, h.journal.Close())
		}
	}
}

func (h *host) run(t *testing.T, when string, steps []key, kill int, restored bool) {
	t.Helper()
	clear(h.on)
	fail := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
	}
	for i, k := range steps {
		fail(h.apply(k))
		if i != kill {
			continue
		}
		fail(h.killed())
		if restored {
			_, err := h.journal.Restore(kernel.Opener(h.roots), nil)
			fail(errors.Join(err, h.settle()))
			return
		}
		for _, k := range maps.Clone(h.on) {
			fail(h.apply(k))
		}
	}
}
