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

// The bounds of one container's labels in discover.Set; see Container.LeftOut.
const (
	MaxLabel  = 4096 // bytes of a key with its value
	MaxLabels = 1024
	MaxAll    = 256 << 10 // bytes of all labels; Kubernetes allows as much for an object's annotations
)

// CgroupSource is the Source of a container that only the cgroup tree shows: no runtime has
// reported it.
const CgroupSource = "cgroup"

// ID identifies a container everywhere in fairlead: the inode number of its cgroup v2 directory,
// which is what bpf_get_current_cgroup_id and friends return. It is unique until the next boot.
type ID uint64

// String returns the ID in decimal, as it appears in metrics and in the API.
func (id ID) String() string { return strconv.FormatUint(uint64(id), 10) }

// Container is what is known about one container at one moment. A zero field is unknown. Values are
// immutable once a Set has published them: readers must not change their maps and slices.
type Container struct {
	ID        ID
	Name      string            // the runtime's name for it, NAMESPACE/POD/CONTAINER in a pod; else the last element of its cgroup
	Source    string            // the source that knows it best: "docker", "podman", "containerd", "cri-o", "sandbox", "cgroup"
	RuntimeID string            // the runtime's own id (64 hex digits for Docker), "" without a runtime
	Image     string            // as given at the start
	Labels    map[string]string // from the operator: labels, and the CRI's annotations
	LeftOut   map[string]int    // size in bytes of each label dropped from both maps because it is too long, or there are too many
	Pod       string            // Kubernetes pod name, if CRI reports it
	Namespace string            // Kubernetes namespace, if CRI reports it

	// Annotations are the keys of Labels that are annotations.
	Annotations map[string]bool

	// ImageLabels are the labels from the image that the operator has not overridden. The image
	// builder chose them. If the image's configuration is unknown, they are all labels.
	ImageLabels map[string]string

	// ImageNames are the names of the image. They are set only if Image is an id, or has a digest
	// and so no tag.
	ImageNames []string

	// Requests are the extended resources of fairlead that kubelet has given to the container, by
	// name without the domain. PodRequests are the sums over all containers of its pod.
	Requests, PodRequests map[string]uint64

	PID     int       // the init process, in the agent's pid namespace; 0 once it has ended
	Started time.Time // when PID was started, from its start time in proc

	Cgroup Cgroup

	// PodCgroup means that the parent of each directory in Cgroup is the cgroup of Pod alone: the
	// CRI reports it, and its name contains the pod's UID.
	PodCgroup bool

	// NetNS is the inode of the network namespace of PID; 0 if PID has ended. Containers with equal
	// NetNS are one network tenant (a pod, or --network container:X). HostNetwork means that it is
	// the agent's own.
	NetNS       uint64
	HostNetwork bool
	Interfaces  []Interface // every device in NetNS but lo; empty for HostNetwork

	// Many means that NetNS has more devices or addresses than are examined. Interfaces then has at
	// most 64 devices, those that lead to the host first.
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

// TenantKey identifies a network tenant. Containers that share a network namespace are one tenant.
// In the host's namespace each container is a tenant.
type TenantKey struct {
	NetNS     uint64 // inode; 0 for a container in the host's namespace
	Container ID     // 0 unless NetNS is
}

// TenantKey returns the key of the container's network tenant. It is zero if the container's
// network is unknown because the container has ended.
func (c Container) TenantKey() TenantKey {
	if c.HostNetwork {
		return TenantKey{Container: c.ID}
	}
	return TenantKey{NetNS: c.NetNS}
}

// Short returns the Name without the pod's. It is unique only within a pod.
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
	// Apart means that the device is no veth, and that what is below it, such as the device below a
	// VLAN or the socket of a tunnel, is in another network namespace.
	Apart bool
}

// HasHostEnd reports whether the device is a veth with a known other end. Such a device has its own
// NAPI. A macvlan has none: the device below polls its packets together with all others.
func (i Interface) HasHostEnd() bool { return i.Kind == "veth" && i.Host.NetNS != 0 }

// HostEnd is the peer of a container's veth. It may be in the host's namespace (Docker's bridge),
// in another one (Docker's overlay keeps its bridge in a separate namespace), or out of the agent's
// sight (NetNS 0: macvlan, ipvlan, or a namespace without name and process).
type HostEnd struct {
	NetNS  uint64 // inode of its namespace
	NSPath string // a path to that namespace
	Name   string
	Index  int
	Master string // the bridge that it is a port of, "" if none

	// Trusted means that the namespace is the agent's own, or mounted where the agent sees it. Any
	// other namespace was found through processes or their mounts, so a container may have made it,
	// with everything in it.
	Trusted bool
}
