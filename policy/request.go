package policy

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/container"
)

// RequestDomain is the domain of the extended resources that pods request of kubelet.
const RequestDomain = "fairlead.dev/"

// The resources of every host, in Mbit/s. Each named disk adds two more, see [DiskResources].
const (
	ResourceEgress  = "egress-mbit"
	ResourceIngress = "ingress-mbit"
)

// DiskResources returns the names of the resources of a disk: reads and writes per second.
func DiskResources(name string) (reads, writes string) { return name + "-riops", name + "-wiops" }

// diskName matches a name of a disk that, with its ending, is valid in Kubernetes.
var diskName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,56}$`)

// CheckDiskName returns an error unless a name can be part of a Kubernetes resource name.
func CheckDiskName(name string) error {
	if !diskName.MatchString(name) {
		return fmt.Errorf("%s is no name for a disk: want at most 57 lower-case letters, digits and dashes", quote(name))
	}
	return nil
}

// Disks are the disks of which pods can request resources, by name: paths below /dev.
type Disks map[string]string

// NameDisks sets the disks of which pods can request resources. Call it before anything else.
func (s *Store) NameDisks(disks Disks) { s.disks = disks }

// requests is what a container requested of kubelet, by the keys of policy.
type requests struct {
	layer    layer
	problems []Problem
}

// requested reads the requests of a container. Network bandwidth counts for the whole pod, because its
// containers share one network: kubelet grants it to single containers, and the pod gets the sum.
func requested(c container.Container, disks Disks) requests {
	r := requests{layer: layer{}}
	if len(c.Requests)+len(c.PodRequests) == 0 {
		return r
	}
	net := c.PodRequests
	if c.HostNetwork {
		net = c.Requests
	}
	for _, x := range []struct{ key, resource string }{{"net.rate", ResourceEgress}, {"net.ingress.rate", ResourceIngress}} {
		if n := net[x.resource]; n > 0 {
			r.add(x.key, strconv.FormatUint(n, 10)+"mbit", x.resource)
		}
	}
	known := []string{ResourceEgress, ResourceIngress}
	var devices, resources []string
	for _, name := range slices.Sorted(maps.Keys(disks)) {
		text := disks[name]
		reads, writes := DiskResources(name)
		for _, x := range []struct{ figure, resource string }{{" riops=", reads}, {" wiops=", writes}} {
			known = append(known, x.resource)
			if n := c.Requests[x.resource]; n > 0 {
				text += x.figure + strconv.FormatUint(n, 10)
				resources = append(resources, x.resource)
			}
		}
		if text != disks[name] {
			devices = append(devices, text)
		}
	}
	if len(devices) > 0 {
		r.add("io.reserve", strings.Join(devices, "; "), resources...)
	}
	for _, resource := range slices.Sorted(maps.Keys(c.Requests)) {
		if !slices.Contains(known, resource) {
			r.problems = append(r.problems, Problem{
				Key: RequestDomain + resource, Value: strconv.FormatUint(c.Requests[resource], 10),
				Reason: "no disk has that name here any more: name it by the agent's flag --kubelet-disk",
			})
		}
	}
	return r
}

func (r *requests) add(key, value string, resources ...string) {
	k, _ := lookup(key)
	set, err := k.parseValue(value)
	if err != nil {
		r.problems = append(r.problems, Problem{Key: prefix + key, Value: value, Reason: "requested: " + err.Error()})
		return
	}
	r.layer[key] = entry{set: set, origin: Origin{Key: prefix + key, Value: value, From: "request of " + RequestDomain + strings.Join(resources, ", ")}}
}

// without returns the layer without keys that labels set.
func (r requests) without(labels layer) layer {
	l := maps.Clone(r.layer)
	maps.DeleteFunc(l, func(key string, _ entry) bool { return labels.has(key) })
	return l
}
