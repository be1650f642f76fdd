package agent

import (
	"fmt"
	"path/filepath"
	"regexp"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// device is how the kernel and the journal name a network device.
type device struct {
	netns uint64 // inode of its namespace
	index int
}

// Devices are the names of network devices, for texts that people read.
type Devices map[device]string

// HostDevices names the devices of the namespace of this process. Devices that cannot be listed
// have no name.
func HostDevices(roots kernel.Roots) Devices {
	names := make(Devices)
	ns, err := netdev.Open(filepath.Join(roots.Proc, "self/ns/net"))
	if err != nil {
		return names
	}
	defer ns.Close()
	links, err := ns.Links(netdev.MostLinks)
	if err != nil {
		return names
	}
	for _, l := range links {
		names[device{ns.Inode(), l.Index}] = l.Name
	}
	return names
}

// devices names the devices of the host and of running containers.
func (a *Agent) devices() Devices {
	names := HostDevices(a.cfg.Roots)
	for _, c := range a.set.Snapshot().Containers {
		for _, i := range c.Interfaces {
			if c.NetNS != 0 {
				names[device{c.NetNS, i.Index}] = i.Name + " of " + c.Name
			}
			if i.Host.Index != 0 {
				names[device{i.Host.NetNS, i.Host.Index}] = i.Host.Name
			}
		}
	}
	return names
}

// of names the device of a journal object (NETNS/INDEX, and perhaps more); "" if it has none, or
// its name is not known.
func (d Devices) of(object string) string {
	var at device
	if n, _ := fmt.Sscanf(object, "%d/%d", &at.netns, &at.index); n < 2 {
		return ""
	}
	return d[at]
}

// numbered matches a device in errors of packages netdev and qdisc.
var numbered = regexp.MustCompile(`device ([0-9]+) (?:in|of) netns ([0-9]+)`)

// named puts the names of devices into the text of an error. It calls find for them only if there
// is such a device.
func named(text string, find func() Devices) string {
	return numbered.ReplaceAllStringFunc(text, func(s string) string {
		m := numbered.FindStringSubmatch(s)
		if name := find().of(m[2] + "/" + m[1]); name != "" {
			return name
		}
		return s
	})
}
