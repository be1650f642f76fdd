package kubernetes

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Node is one node of a cluster.
type Node struct {
	Name    string // "n1"
	Address string // of its eth0

	cluster *Cluster
	number  int
	space
}

// pauseImage is the image of the containers that hold the pods' namespaces.
const pauseImage = "local.test/pause:1"

// A node sees the machine's files, but has its own /etc, /run, /var/lib and /var/log, with
// everything that Kubernetes, containerd or an agent keeps there, and a sysfs of its network
// namespace. Pods may request that mounts from the node reach them, so these are shared.
const mounts = `cd "$0"
mkdir cgroup etc etc.work lib log
mount --rbind /sys/fs/cgroup cgroup
mount -t sysfs sysfs /sys
mount --move cgroup /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
mount -t debugfs debugfs /sys/kernel/debug
mount -t tmpfs -o mode=755 tmpfs /run
mount -t overlay -o lowerdir=/etc,upperdir=etc,workdir=etc.work overlay /etc
mount --bind lib /var/lib
mount --bind log /var/log
mkdir -p /run/lock /run/netns /etc/cni/net.d /var/lib/kubelet /var/log/pods /var/log/containers
mount --make-rshared /
`

func newNode(c *Cluster, number int) *Node {
	name := fmt.Sprintf("n%d", number)
	return &Node{
		Name: name, Address: fmt.Sprintf("10.250.0.%d", 10+number),
		cluster: c, number: number, space: space{dir: filepath.Join(c.dir, name), mark: c.mark(), files: true},
	}
}

// pods is the start of the addresses of the node's pods.
func (n *Node) pods() string { return fmt.Sprintf("10.244.%d", n.number) }

// mac is the address of the node in the VXLAN.
func (n *Node) mac() string { return fmt.Sprintf("02:f1:00:00:00:%02x", n.number) }

// CgroupRoot is the directory, below the root of each hierarchy, with the cgroups of the node's
// pods. A kubelet removes cgroups that it does not know, so each node has its own.
func (n *Node) CgroupRoot() string { return "/" + filepath.Base(n.cluster.dir) + "/" + n.Name }

// CPU is the CPU of the node's pods, so that load on one node does not affect another. Its kubelet
// and containerd run anywhere.
func (n *Node) CPU() int { return (n.number - 1) % runtime.NumCPU() }

// PID is a process in the node's namespaces.
func (n *Node) PID() int { return n.pid }

// Command prepares a program as a process of the node, in the node's namespaces.
func (n *Node) Command(ctx context.Context, args ...string) *exec.Cmd {
	return n.command(ctx, args...)
}

// Import loads an image for pods with `imagePullPolicy: Never`, from a file in the format of
// `docker save` or an OCI archive.
func (n *Node) Import(ctx context.Context, path string) error {
	_, err := output(n.command(ctx, "ctr", "--namespace", "k8s.io", "images", "import", path))
	return err
}

func (n *Node) start(ctx context.Context) error {
	if err := n.hold(ctx, mounts); err != nil {
		return fmt.Errorf("node %s: %w", n.Name, err)
	}
	for _, do := range []func(context.Context) error{n.connect, n.makeCgroups, n.startContainerd, n.startKubelet} {
		if err := do(ctx); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	return nil
}

// connect connects the node to the underlay. The node's own CPU receives its packets, not the CPU
// of their sender.
func (n *Node) connect(ctx context.Context) error {
	if _, err := n.cluster.control.run(ctx, fmt.Sprintf(`ip link add ul%d type veth peer name eth0 netns %d
ip link set ul%[1]d master ul0 up
ip route add %[3]s.0/24 via %[4]s`, n.number, n.pid, n.pods(), n.Address)); err != nil {
		return err
	}
	_, err := n.run(ctx, fmt.Sprintf(`ip link set lo up
ip addr add %s/24 dev eth0
ethtool -K eth0 gro on # so that it polls, as hardware does
ip link set eth0 up
ip route add default via 10.250.0.1
echo %x >/sys/class/net/eth0/queues/rx-0/rps_cpus
echo 1 >/proc/sys/net/ipv4/ip_forward`, n.Address, 1<<n.CPU()))
	return err
}

// makeCgroups makes CgroupRoot in all hierarchies. In a new cgroup of v1 the files of cpuset are
// empty, so nothing could run there.
func (n *Node) makeCgroups(ctx context.Context) error {
	_, err := n.run(ctx, fmt.Sprintf(`for h in /sys/fs/cgroup /sys/fs/cgroup/*; do
	test -e $h/cgroup.procs || continue
	d=$h
	for name in %s; do
		mkdir -p $d/$name
		d=$d/$name
	done
	test -e $h/cpuset.cpus || continue
	for f in cpuset.mems cpuset.cpus; do
		cat $h/$f >$d/../$f
		cat $h/$f >$d/$f
	done
done`, strings.ReplaceAll(n.CgroupRoot()[1:], "/", " ")))
	return err
}

func (n *Node) startContainerd(ctx context.Context) error {
	// restrict_oom_score_adj: without CAP_SYS_RESOURCE, a negative value (pause has one) makes runc
	// fail.
	config := fmt.Sprintf(`version = 2
root = %q
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %q
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
`, n.path("containerd"), pauseImage)
	network := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "cbr0", "plugins": [
{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "mtu": 1450,
"ipam": {"type": "host-local", "ranges": [[{"subnet": "%s.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
{"type": "portmap", "capabilities": {"portMappings": true}}]}
`, n.pods())
	if err := n.write(ctx, "/etc/cni/net.d/10-bridge.conflist", network); err != nil {
		return err
	}
	if err := os.WriteFile(n.path("containerd.toml"), []byte(config), 0o644); err != nil {
		return err
	}
	if err := n.space.start("containerd", "containerd", "--config", n.path("containerd.toml")); err != nil {
		return err
	}
	if err := n.cluster.await(ctx, "containerd to answer", func() error { _, err := output(n.command(ctx, "ctr", "version")); return err }); err != nil {
		return err
	}
	image, err := testkit.Image(pauseImage, nil)
	if err == nil {
		err = os.WriteFile(n.path("pause.tar"), image, 0o644)
	}
	if err != nil {
		return err
	}
	return n.Import(ctx, n.path("pause.tar"))
}

// write writes a file of the node.
func (n *Node) write(ctx context.Context, path, content string) error {
	cmd := n.command(ctx, "tee", path)
	cmd.Stdin = strings.NewReader(content)
	_, err := output(cmd)
	return err
}

func (n *Node) startKubelet(context.Context) error {
	// Pods run on the node's CPU: kubelet reserves all others for the system.
	var reserved []string
	for cpu := range runtime.NumCPU() {
		if cpu != n.CPU() {
			reserved = append(reserved, strconv.Itoa(cpu))
		}
	}
	cpus := ""
	if len(reserved) > 0 {
		cpus = fmt.Sprintf(`cpuManagerPolicy: static
cpuManagerPolicyOptions: {strict-cpu-reservation: "true"}
reservedSystemCPUs: %q
`, strings.Join(reserved, ","))
	}
	// The machine's disk may be nearly full; this kubelet must not react to that.
	kubelet := fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: %s
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
volumePluginDir: /var/lib/kubelet/volumeplugins
resolvConf: ""
oomScoreAdj: 0
makeIPTablesUtilChains: false
maxPods: 120
evictionHard: {}
imageGCHighThresholdPercent: 100
%s`, n.CgroupRoot(), cpus)
	// The sysctls of conntrack belong to the machine.
	proxy := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: 10.244.0.0/16
hostnameOverride: %s
clientConnection: {kubeconfig: %s}
conntrack: {maxPerCore: 0, min: 0}
`, n.Name, n.cluster.Kubeconfig())
	for name, content := range map[string]string{"kubelet.yaml": kubelet, "kube-proxy.yaml": proxy} {
		if err := os.WriteFile(n.path(name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := n.space.start("kubelet", n.cluster.program(), "kubelet", "--config="+n.path("kubelet.yaml"), "--kubeconfig="+n.cluster.Kubeconfig(),
		"--hostname-override="+n.Name, "--node-ip="+n.Address); err != nil {
		return err
	}
	return n.space.start("kube-proxy", n.cluster.program(), "kube-proxy", "--config="+n.path("kube-proxy.yaml"))
}

// StartRouter starts kube-router, for NetworkPolicy alone. It runs until [Cluster.Stop].
func (n *Node) StartRouter() error {
	return n.space.start("kube-router", n.cluster.program(), "kube-router", "--kubeconfig="+n.cluster.Kubeconfig(),
		"--hostname-override="+n.Name, "--run-firewall", "--run-router=false", "--run-service-proxy=false")
}
