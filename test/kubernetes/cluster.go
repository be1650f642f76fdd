// Package kubernetes runs a cluster of Kubernetes on this machine, for tests and for people who try
// something: a control plane (etcd, API server, controller manager and scheduler) and nodes
// (kubelet, containerd, kube-proxy), each in a separate network namespace and mount namespace. The
// programs are Kubernetes' own, from its Go modules, and the distribution's. The package makes no
// test itself and does not know fairlead. Tests of the fleet and the command in the folder cluster
// use it.
//
//	control plane   bridge ul0, 10.250.0.1: the underlay
//	node n1         eth0 10.250.0.11 | cni0 10.244.1.1/24 with a veth for each pod | flannel.1
//	node n2         eth0 10.250.0.12 | cni0 10.244.2.1/24 ...                      | flannel.1
//
// The nodes are connected by a VXLAN with the devices, addresses and permanent entries that Flannel
// makes (backend vxlan). A script here makes them: flanneld does not build, because a module that
// one of its other backends needs is not available.
//
// It does not touch the machine's own network namespace. All its processes have the name of the
// cluster in their environment, and the pods' cgroups are below that name, so that [Cluster.Stop]
// finds them even after a crash. Process IDs are the machine's.
package kubernetes

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Cluster is a running cluster. Its state and the logs of its programs are in one directory.
type Cluster struct {
	Nodes []*Node

	dir     string
	control space
}

// tokens authenticates the only user, who may do everything.
const tokens = `fairlead,admin,admin,"system:masters"` + "\n"

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://10.250.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: fairlead}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`

// Start starts a cluster with nodes n1, n2 and so on, and returns when all of them are ready: about
// ten seconds, or minutes where [Build] has to build. dir must not exist; its last element is the
// cluster's name, which begins with "fl". It needs root and what `test/setup kubernetes` installs. If
// it fails, it removes what it has started; the logs stay in dir. Errors: ErrNoModules,
// ErrMissing.
func Start(ctx context.Context, dir string, nodes int) (*Cluster, error) {
	for _, needed := range []string{"etcd", "containerd", "runc", "busybox", "nft", "iptables", "ipset", "ethtool", "/usr/lib/cni/bridge"} {
		if _, err := exec.LookPath(needed); err != nil {
			return nil, fmt.Errorf("start a cluster: %s is %w", needed, ErrMissing)
		}
	}
	program, err := Build(ctx)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	c := &Cluster{dir: dir}
	if err := c.start(ctx, program, nodes); err != nil {
		return nil, errors.Join(err, c.kill())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context, program string, nodes int) error {
	if err := os.Mkdir(c.bin(), 0o755); err != nil {
		return err
	}
	for _, name := range []string{"hyperkube", "kubectl"} {
		if err := os.Symlink(program, filepath.Join(c.bin(), name)); err != nil {
			return err
		}
	}
	if err := c.startControl(ctx); err != nil {
		return fmt.Errorf("start the control plane: %w", err)
	}
	for i := range nodes {
		c.Nodes = append(c.Nodes, newNode(c, i+1))
	}
	errs := make([]error, nodes)
	var all sync.WaitGroup
	for i, n := range c.Nodes {
		all.Go(func() { errs[i] = n.start(ctx) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := c.overlay(ctx); err != nil {
		return err
	}
	args := []string{"wait", "--for=condition=Ready"}
	for _, n := range c.Nodes {
		args = append(args, "node/"+n.Name)
	}
	// A node that has not registered yet is an error, not one to wait for.
	return c.await(ctx, "the nodes to be ready", func() error { _, err := c.Kubectl(ctx, args...); return err })
}

// Open returns the cluster that Start started in dir, perhaps in another process.
func Open(dir string) (*Cluster, error) {
	c := &Cluster{dir: dir, control: space{dir: filepath.Join(dir, "control")}}
	if err := c.control.open(); err != nil {
		return nil, fmt.Errorf("no cluster in %s: %w", dir, err)
	}
	for i := 1; ; i++ {
		n := newNode(c, i)
		err := n.open()
		if errors.Is(err, os.ErrNotExist) {
			return c, nil
		} else if err != nil {
			return nil, err
		}
		c.Nodes = append(c.Nodes, n)
	}
}

func (c *Cluster) startControl(ctx context.Context) error {
	c.control = space{dir: filepath.Join(c.dir, "control"), mark: c.mark()}
	if err := c.control.hold(ctx, ""); err != nil {
		return err
	}
	if _, err := c.control.run(ctx, `ip link set lo up
ip link add ul0 type bridge
ip addr add 10.250.0.1/24 dev ul0
ip link set ul0 up`); err != nil {
		return err
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	at := c.control.path
	for name, content := range map[string]string{
		"sa.key":     string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
		"tokens.csv": tokens,
	} {
		if err := os.WriteFile(at(name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	if err := os.WriteFile(c.Kubeconfig(), []byte(kubeconfig), 0o600); err != nil {
		return err
	}
	if err := c.control.start("etcd", "etcd", "--data-dir="+at("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380"); err != nil {
		return err
	}
	if err := c.control.start("kube-apiserver", c.program(), "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--cert-dir="+c.control.dir,
		"--advertise-address=10.250.0.1", "--secure-port=6443", "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC",
		"--token-auth-file="+at("tokens.csv"), "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file="+at("sa.key"), "--service-account-key-file="+at("sa.key"),
		"--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP"); err != nil {
		return err
	}
	if err := c.await(ctx, "the API server to answer", func() error { _, err := c.Kubectl(ctx, "get", "--raw", "/readyz"); return err }); err != nil {
		return err
	}
	if err := c.control.start("kube-controller-manager", c.program(), "kube-controller-manager", "--kubeconfig="+c.Kubeconfig(),
		"--service-account-private-key-file="+at("sa.key"), "--root-ca-file="+at("apiserver.crt"), "--use-service-account-credentials",
		"--leader-elect=false", "--cert-dir="+c.control.dir); err != nil {
		return err
	}
	return c.control.start("kube-scheduler", c.program(), "kube-scheduler", "--kubeconfig="+c.Kubeconfig(), "--leader-elect=false")
}

// Kubeconfig returns the path of a kubeconfig with all rights. The API server can be reached only
// from the namespaces of the cluster: see [Cluster.Command].
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// Command prepares a program in the network namespace of the control plane, from where it reaches
// the API server, the nodes and the pods. KUBECONFIG is set; kubectl is in PATH for its plugins.
func (c *Cluster) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := c.control.command(ctx, args...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+c.Kubeconfig(), "PATH="+c.bin()+":"+os.Getenv("PATH"))
	return cmd
}

// Kubectl runs kubectl and returns what it prints.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return output(c.Command(ctx, append([]string{"kubectl"}, args...)...))
}

// Apply applies manifests.
func (c *Cluster) Apply(ctx context.Context, manifests string) error {
	cmd := c.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifests)
	_, err := output(cmd)
	return err
}

func (c *Cluster) bin() string     { return filepath.Join(c.dir, "bin") }
func (c *Cluster) program() string { return filepath.Join(c.bin(), "hyperkube") }

// mark is the variable in the environment of all processes of the cluster.
func (c *Cluster) mark() string { return "FAIRLEAD_CLUSTER=" + c.dir }

// patience bounds operations that take seconds, so that they may take longer on a busy machine.
const patience = 2 * time.Minute

// await waits until try succeeds, and returns its last error at the time limit.
func (c *Cluster) await(ctx context.Context, what string, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (see the logs in %s)", what, err, c.dir)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// overlay makes the VXLAN between the nodes: on each node the device, and the route to each other node.
func (c *Cluster) overlay(ctx context.Context) error {
	for _, n := range c.Nodes {
		script := fmt.Sprintf(`ip link add flannel.1 address %s mtu 1450 type vxlan id 1 local %s dev eth0 dstport 8472 nolearning
ip addr add %s.0/32 dev flannel.1
ip link set flannel.1 up
`, n.mac(), n.Address, n.pods())
		for _, peer := range c.Nodes {
			if peer != n {
				script += fmt.Sprintf(`bridge fdb append %[1]s dev flannel.1 dst %[2]s
ip neigh add %[3]s.0 lladdr %[1]s dev flannel.1 nud permanent
ip route add %[3]s.0/24 via %[3]s.0 dev flannel.1 onlink
`, peer.mac(), peer.Address, peer.pods())
			}
		}
		if _, err := n.run(ctx, script); err != nil {
			return fmt.Errorf("connect %s to the other nodes: %w", n.Name, err)
		}
	}
	return nil
}

// output runs cmd and returns what it prints, or an error with what it says.
func output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args[slices.Index(cmd.Args, "--")+1:], " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

func parsePID(text []byte) (int, error) {
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err == nil && pid <= 1 {
		err = fmt.Errorf("process %d", pid)
	}
	return pid, err
}
