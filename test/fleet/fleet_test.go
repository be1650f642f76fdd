package fleet

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// byKustomize are the arguments of kubectl that name the installed manifests.
var byKustomize = []string{"-k", "testdata/install"}

// TestFleet installs fairlead in a cluster and checks what it promises there. Its parts share only
// the cluster.
func TestFleet(t *testing.T) {
	if testkit.Scale(t, 0, 1) == 0 {
		testkit.Skip(t, "only in the tier full")
	}
	f := newFleet(t)
	f.kubectl(t, "create", "namespace", "shop")
	f.run(t, pod{name: "first", node: "n1"}, pod{name: "second", node: "n2"})
	before := f.state(t)
	t.Run("Helm", func(t *testing.T) {
		chart := f.helm(t)
		f.install(t, chart)
		f.uninstall(t, chart, before)
	})
	f.install(t, byKustomize)
	t.Run("Flood", f.flood)
	t.Run("Requests", f.requests)
	t.Run("Contention", f.contention)
	t.Run("Restart", f.restart)
	t.Run("Crowd", f.crowd)
	t.Run("Router", f.router)
	t.Run("Uninstall", func(t *testing.T) { f.uninstall(t, byKustomize, before) })
}

// helm renders the chart as Helm does, with a namespace, which Helm itself makes. It returns the
// arguments of kubectl that name the result.
func (f *fleet) helm(t *testing.T) []string {
	t.Helper()
	chart, err := filepath.Abs(filepath.Join(root, "packaging/kubernetes/chart"))
	testkit.Must(t, err)
	cmd := exec.Command("go", "-C", "../kubernetes/render", "run", ".", "helm", chart, "fairlead-system")
	cmd.Stdin = strings.NewReader("config: {kubelet-dir: /var/lib/kubelet, uplink: eth0=1gbit}\n")
	cmd.Stderr = t.Output()
	objects, err := cmd.Output()
	testkit.Must(t, err)
	path := filepath.Join(f.dir, "chart.yaml")
	testkit.Must(t, os.WriteFile(path, objects, 0o644))
	return []string{"-f", filepath.Join(root, "packaging/kubernetes/base/namespace.yaml"), "-f", path}
}

// install applies the manifests by one command. Both nodes must be ready within 30 s.
func (f *fleet) install(t *testing.T, what []string) {
	t.Helper()
	begin := time.Now()
	f.kubectl(t, append([]string{"apply"}, what...)...)
	f.kubectl(t, "rollout", "status", "--namespace=fairlead-system", "daemonset/fairlead", "--timeout=120s")
	for _, n := range f.Nodes {
		a := f.agent(t, n)
		await(t, "the agent of "+n.Name, func() error { _, err := a.Containers(t.Context()); return err })
	}
	took := time.Since(begin)
	t.Logf("both nodes were ready after %.1f s", took.Seconds())
	if took > 30*time.Second {
		t.Errorf("it took %v, want 30 s at most", took)
	}
}

// flood floods a pod from the other node, beside one that computes with half of the node's CPU. The
// penalty is Iron's (section 2): it compares the victim with the same pod beside a neighbour that
// also computes but has no traffic.
func (f *fleet) flood(t *testing.T) {
	penalty := func(t *testing.T, annotations map[string]string, settle int) float64 {
		t.Helper()
		half := map[string]string{"cpu": "500m"}
		burn := []string{"fairlead-lab", "load", "burn", "--every=1s"}
		f.run(t, pod{name: "victim", node: "n1", annotations: annotations, limits: half, command: burn})
		alone := f.measure(t, "victim", 5)
		f.run(t, pod{name: "quiet", node: "n1", annotations: annotations, limits: half, command: burn})
		base := f.measure(t, "victim", 5)
		f.kubectl(t, "delete", "pod", "--namespace=shop", "--wait", "quiet")
		address := f.run(t, pod{name: "receiver", node: "n1", annotations: annotations, limits: half, command: []string{"fairlead-lab", "load", "udp-recv", "--listen=:9000"}})
		f.run(t, pod{name: "sender", node: "n2", command: []string{"fairlead-lab", "load", "udp-send", "--every=1s", "--to=" + address + ":9000"}})
		f.measure(t, "victim", settle)
		flooded := f.measure(t, "victim", 5)
		t.Logf("units/s and bit/s, one second after the other: %.0f", f.windows(t, "victim"))
		t.Logf("%v: alone %.0f units/s, beside one that computes %.0f, beside %.0f packets/s %.0f: penalty %.2f, against alone %.2f",
			annotations, alone.Ops, base.Ops, f.measure(t, "sender", 1).Ops, flooded.Ops, base.Ops/flooded.Ops, alone.Ops/flooded.Ops)
		return base.Ops / flooded.Ops
	}
	t.Run("Unprotected", func(t *testing.T) {
		if p := penalty(t, nil, 2); p < 4 {
			t.Errorf("penalty %.2f, want 4 at least: the flood floods nobody", p)
		}
	})
	t.Run("Auto", func(t *testing.T) {
		if p := penalty(t, map[string]string{"fairlead.netcpu": "auto"}, 12); p > 1.10 {
			t.Errorf("penalty %.2f, want 1.10 at most", p)
		}
	})
}

// uninstall deletes what install has applied. Both nodes must be as before.
func (f *fleet) uninstall(t *testing.T, what []string, before map[string]string) {
	t.Helper()
	f.kubectl(t, append([]string{"delete", "--wait", "--timeout=120s"}, what...)...)
	await(t, "the nodes to be as before", func() error {
		now := f.state(t)
		var diff []string
		for what, text := range before {
			if now[what] != text {
				diff = append(diff, fmt.Sprintf("%s: before\n%s\nnow\n%s", what, text, now[what]))
			}
		}
		if len(diff) > 0 {
			return fmt.Errorf("%s", strings.Join(diff, "\n"))
		}
		return nil
	})
}

// state is what an agent might change on the nodes: devices with their settings, qdiscs, filters, BPF
// programs, cgroups and the files of the agent.
func (f *fleet) state(t *testing.T) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, n := range f.Nodes {
		for what, script := range map[string]string{
			"links":   `ip -details link show | grep -v "^ .*link/" | sed "s/[a-z_]*timer *[0-9.]*//g"`,
			"qdiscs":  `tc qdisc show; tc class show dev eth0`,
			"filters": `for d in /sys/class/net/*; do tc filter show dev ${d##*/} ingress; tc filter show dev ${d##*/} egress; done`,
			"offload": `for d in /sys/class/net/*; do ethtool -k ${d##*/}; cat $d/threaded; cat $d/queues/*/*ps_cpus; done 2>/dev/null`,
			"cgroups": `cd /sys/fs/cgroup; for h in . *; do test -d $h` + n.CgroupRoot() + ` || continue; cd $h` + n.CgroupRoot() + `
find . -name "fl*" -o -name "fairlead*"; find . -name cpu.cfs_quota_us -o -name cpu.shares -o -name cpu.max -o -name cpu.weight | sort | xargs -r grep -H .; cd /sys/fs/cgroup; done`,
			"files": `ls -A /sys/fs/bpf; ls -A /run/fairlead 2>/dev/null | grep -v -e "^state$" -e lock`,
		} {
			out, err := n.Command(t.Context(), "sh", "-c", script).Output()
			if err != nil && len(out) == 0 && what != "files" && what != "filters" {
				t.Fatalf("%s of %s: %v", what, n.Name, err)
			}
			all[n.Name+" "+what] = string(out)
		}
	}
	return all
}
