package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Node is a test's own node of Kubernetes: a containerd with a CNI bridge, and a kubelet that runs
// the pods with manifests in a directory (static pods), so that it needs no API server.
type Node struct {
	*Containerd
	Name      string // the kubelet appends it to the names of pods
	manifests string
}

// StartNode starts a node; program is a kubelet, or a program that is one if it is called kubelet. It
// needs root, what [StartContainerd] needs and the usual CNI plugins, and skips t without.
func StartNode(t testing.TB, program string) *Node {
	t.Helper()
	const plugins = "/usr/lib/cni"
	if _, err := os.Stat(filepath.Join(plugins, "host-local")); err != nil {
		Skip(t, "no CNI plugins")
	}
	c := startContainerd(t, func(c *Containerd) string {
		conf := filepath.Join(c.dir, "cni")
		write(t, filepath.Join(conf, "10.conflist"), fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "flnet", "plugins": [{
"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": {"type": "host-local", "dataDir": %q,
"ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, filepath.Join(c.dir, "ipam")))
		return fmt.Sprintf(`[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %q
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = %q
conf_dir = %q
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
`, c.Image, plugins, conf)
	})
	c.Import(t, "k8s.io")
	n := &Node{Containerd: c, Name: "flnode", manifests: filepath.Join(c.dir, "pods")}
	Must(t, os.Mkdir(n.manifests, 0o755))
	c.makeParent(t)
	config := filepath.Join(c.dir, "kubelet.yaml")
	write(t, config, fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: %s
fileCheckFrequency: 1s
podLogsDir: %s
cgroupDriver: cgroupfs
cgroupRoot: /%s
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://%s
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
enableServer: false
resolvConf: ""
oomScoreAdj: 0
makeIPTablesUtilChains: false
evictionHard: {}
imageGCHighThresholdPercent: 100
`, n.manifests, filepath.Join(c.dir, "podlogs"), c.CgroupParent, c.Socket))
	os.Symlink(program, filepath.Join(c.dir, "kubelet"))
	t.Setenv("PATH", c.dir+":"+os.Getenv("PATH"))
	kubelet := startDaemon(t, c.proc, c.NS, c.dir, "kubelet", "--config", config, "--root-dir", filepath.Join(c.dir, "kubelet.d"),
		"--hostname-override", n.Name)
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(kubelet.log)
			t.Logf("log of the kubelet:\n%s", tail(log, 4000))
		}
		kubelet.kill()
	})
	return n
}

// makeParent creates the cgroup CgroupParent in all hierarchies.
func (c *Containerd) makeParent(t testing.TB) {
	t.Helper()
	mounts, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	Must(t, err)
	for _, procs := range append(mounts, "/sys/fs/cgroup/cgroup.procs") {
		root := filepath.Dir(procs)
		if _, err := os.Stat(procs); err != nil {
			continue
		}
		dir := filepath.Join(root, c.CgroupParent)
		Must(t, os.MkdirAll(dir, 0o755))
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} { // empty in a new v1 cgroup
			if data, err := os.ReadFile(filepath.Join(root, file)); err == nil && len(strings.TrimSpace(string(data))) > 0 {
				os.WriteFile(filepath.Join(dir, file), data, 0)
			}
		}
	}
}

// Pod has the kubelet run a pod, or none for the manifest "".
func (n *Node) Pod(t testing.TB, name, manifest string) {
	t.Helper()
	path := filepath.Join(n.manifests, name+".yaml")
	if manifest == "" {
		Must(t, os.Remove(path))
		return
	}
	write(t, path+".new", manifest)
	Must(t, os.Rename(path+".new", path))
}

func write(t testing.TB, path, text string) {
	t.Helper()
	Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	Must(t, os.WriteFile(path, []byte(text), 0o644))
}
