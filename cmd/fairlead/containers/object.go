package containers

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/cmd/internal/cli"
)

// objectText describes the object of a change in words. The journal's name for a device is
// NETNS/INDEX/DETAIL, and for a thread TID:START:HIERARCHY. Other names stay as they are.
// named is the device's name, if the agent knows it.
func objectText(c api.Container, kind, object, named string) string {
	if device, detail, ok := deviceText(c, object, named); ok {
		switch kind {
		case "offload":
			return fmt.Sprintf("offload %s of %s", cli.Show(detail), device)
		case "threaded":
			return "threaded NAPI of " + device
		case "rps":
			return fmt.Sprintf("packet steering (rps_cpus) of queue %s of %s", cli.Show(detail), device)
		case "defer":
			return fmt.Sprintf("delay of polls (%s) of %s", cli.Show(detail), device)
		case "qdisc":
			return "root qdisc of " + device
		case "txqueuelen":
			return "queue length of " + device
		case "ifb":
			return "device that takes in what arrives (IFB) of " + device
		case "pair":
			return "veth pair past the network namespace of " + device
		case "tc-filter":
			hook, name, _ := strings.Cut(detail, "/")
			return fmt.Sprintf("program %s at the %s hook of %s", cli.Show(name), cli.Show(hook), device)
		case "forward-priority":
			return "priority of forwarded packets (ip_forward_update_priority)"
		case "sysfs":
			return "view of sysfs into the container's network"
		}
	}
	switch kind {
	case "kthread", "affinity", "slice", "nice":
		tid, rest, ok := strings.Cut(object, ":")
		if _, err := strconv.Atoi(tid); err != nil || !ok {
			break
		}
		switch kind {
		case "affinity":
			return "allowed CPUs of kernel thread " + tid
		case "slice":
			return "slice, in ns, of kernel thread " + tid
		case "nice":
			return "nice value of kernel thread " + tid
		}
		_, hierarchy, _ := strings.Cut(rest, ":")
		return fmt.Sprintf("control group of kernel thread %s in %s", tid, cli.Show(hierarchy))
	case "file":
		return cli.Show(object)
	}
	return cli.Show(kind) + " " + cli.Show(object)
}

// deviceText names the device of an object NETNS/INDEX/DETAIL: one in the container, the
// other end of such a device, or another of the host.
func deviceText(c api.Container, object, named string) (device, detail string, ok bool) {
	parts := append(strings.SplitN(object, "/", 3), "")
	if len(parts) < 3 {
		return "", "", false
	}
	netns, err1 := strconv.ParseUint(parts[0], 10, 64)
	index, err2 := strconv.Atoi(parts[1])
	if err1 != nil || err2 != nil {
		return "", "", false
	}
	for _, i := range c.Interfaces {
		if c.NetNS != 0 && c.NetNS == netns && i.Index == index {
			return fmt.Sprintf("%s in the container", cli.Show(i.Name)), parts[2], true
		}
		if i.Host != nil && i.Host.NetNS == netns && i.Host.Index == index {
			return fmt.Sprintf("%s, the other end of %s", cli.Show(i.Host.Name), cli.Show(i.Name)), parts[2], true
		}
	}
	if named == "" {
		return "a device that is not seen any more", parts[2], true
	}
	return cli.Show(named), parts[2], true
}
