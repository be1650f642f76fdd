// Package container describes a container: its id, cgroup, network namespace and devices.
//
// It is a leaf that everything else may use. Package discover finds the containers of a host.
package container

import (
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// How much discover.Set keeps of one container's labels; see Container.LeftOut.
const (
	MaxLabel  = 4096 // bytes of a key with its value
	MaxLabels = 1024
	MaxAll    = 256 << 10 // bytes of all of them; what Kubernetes allows an object's annotations
)

// CgroupSource is the Source of a container that only the cgroup tree shows: no runtime has
// reported it.
const CgroupSource = "cgroup"

// ID identifies a container everywhere in fairlead: the inode number of its cgroup v2 directory,
// which is what bpf_get_current_cgroup_id and friends return. It is unique until the next boot.
type ID uint64

// String returns the ID in decimal, as it appears in metrics and in the API.
func (id ID) String() string { return strconv.FormatUint(uint64(id), 10) }

// Container is what is known of one container at one moment. A zero field is unknown. Values are
// immutable once a Set has published them: readers must not change the maps and slices in them.
type Container struct {
	ID        ID
	Name      string            // the runtime's name for it, NAMESPACE/POD/CONTAINER in a pod; else the last element of its cgroup
	Source    string            // the source that knows it best: "docker", "podman", "containerd", "cri-o", "sandbox", "cgroup"
	RuntimeID string            // the runtime's own id (64 hex digits for Docker), "" without a runtime
	Image     string            // as written at its start
	Labels    map[string]string // from its operator: labels, and the CRI's annotations
	LeftOut   map[string]int    // labels left out of both maps because they are too long, or too many: the bytes of each
	Pod       string            // Kubernetes pod name, if CRI reports it
	Namespace string            // Kubernetes namespace, if CRI reports it

	// Annotations are the keys of Labels that are annotations.
	Annotations map[string]bool

	// ImageLabels are the labels from the image that the operator has not given another value: the
	// image builder's word. If the image's configuration is unknown, they are all labels.
	ImageLabels map[string]string

	// ImageNames are the names of the image if Image is its id or has a digest, and so has no name,
	// or no tag.
	ImageNames []string

	// Requests are what kubelet has given to the container of the extended resources that pods
	// request for fairlead, by name without the domain; PodRequests are those of all containers of
	// its pod together.
	Requests, PodRequests map[string]uint64

	PID     int       // the init process, in the agent's pid namespace; 0 once it has ended
	Started time.Time // when PID was started, from its start time in proc

	Cgroup Cgroup

	// PodCgroup: the parent of each directory in Cgroup is the cgroup of Pod only: the CRI names
	// it, and its name holds the pod's UID.
	PodCgroup bool

	// NetNS is the inode of the network namespace of PID; 0 if PID has ended. Containers with equal
	// NetNS are one network tenant (a pod, or --network container:X). HostNetwork: it is the
	// agent's own.
	NetNS       uint64
	HostNetwork bool
	Interfaces  []Interface // every device in NetNS but lo; empty for HostNetwork

	// Many: NetNS has more devices or addresses than are examined. Interfaces then holds at most 64
	// devices, those that lead to the host first.
	Many bool
}

// TenantGroup returns the cgroup, in the hierarchy of the cpu controller, of the container's
// network tenant: its pod's, if it has one, or else its own.
func (c Container) TenantGroup() (string, error) {
	switch {
	case c.Cgroup.CPU == "":
		return "", errors.New("the container's cpu cgroup is not known")
	case c.PodCgroup:
		return filepath.Dir(c.Cgroup.CPU), nil
	}
	return c.Cgroup.CPU, nil
}

// TenantUsageGroup returns the directory of the same cgroup in cgroup v2, which counts its CPU time
// and its waits; "" on a host without v2.
func (c Container) TenantUsageGroup() string {
	if c.PodCgroup && c.Cgroup.V2 != "" {
		return filepath.Dir(c.Cgroup.V2)
	}
	return c.Cgroup.V2
}

// TenantKey identifies a network tenant. Containers that share a network namespace are one tenant;
// each container in the host's is a tenant of its own.
type TenantKey struct {
	NetNS     uint64 // inode; 0 for a container in the host's namespace
	Container ID     // 0 unless NetNS is
}

// TenantKey returns the key of the container's network tenant. It is zero if the container's
// network is not known (it has ended).
func (c Container) TenantKey() TenantKey {
	if c.HostNetwork {
		return TenantKey{Container: c.ID}
	}
	return TenantKey{NetNS: c.NetNS}
}

// Short is the Name without the pod's: it is unique in a pod only.
func (c Container) Short() string {
	if c.Pod == "" {
		return c.Name
	}
	return strings.TrimPrefix(c.Name, c.Namespace+"/"+c.Pod+"/")
}

// Cgroup holds the directories of one container, absolute and below the injected cgroup root. On a
// pure v2 host the controller paths equal V2; on v1 and hybrid hosts they lie in the controllers'
// own hierarchies. A controller that is not mounted has "".
type Cgroup struct {
	V2     string
	CPU    string
	CPUSet string
	IO     string // blkio on v1
}

// Interface is a network device inside a container's network namespace.
type Interface struct {
	Name  string
	Index int
	Kind  string   // as the kernel names it: "veth", "macvlan", "ipvlan", ...
	MAC   string   // in colon form
	Addrs []string // prefixes in CIDR form
	Host  HostEnd
	// Apart: the device is no veth, and what is below it, as the device below a VLAN or the socket
	// of a tunnel, is in another network namespace.
	Apart bool
}

// HasHostEnd reports whether the device is a veth with a known other end. Such a device is polled
// on its own; the device below a macvlan polls it, together with the packets of all others.
func (i Interface) HasHostEnd() bool { return i.Kind == "veth" && i.Host.NetNS != 0 }

// HostEnd is the peer of a container's veth. It may be in the host's own namespace (Docker's
// bridge), in another one (Docker's overlay keeps its bridge in a namespace of its own), or nowhere
// that the agent can see (NetNS 0: macvlan, ipvlan, or a namespace without name and process).
type HostEnd struct {
	NetNS  uint64 // inode of its namespace
	NSPath string // a path to that namespace
	Name   string
	Index  int
	Master string // the bridge that it is a port of, "" if none

	// Trusted: the namespace is the agent's own, or mounted where the agent sees it. Any other
	// namespace was found through processes or their mounts: a container may have made it, with
	// everything in it.
	Trusted bool
}
