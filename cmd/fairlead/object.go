package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

// objectText describes the object of a change in words. The journal's name for a device is
// NETNS/INDEX/DETAIL, and for a thread TID:START:HIERARCHY. Other names stay as they are.
func objectText(c api.Container, kind, object string) string {
	switch kind {
	case "offload", "threaded", "rps":
		parts := strings.SplitN(object, "/", 3)
		if len(parts) != 3 {
			break
		}
		netns, err1 := strconv.ParseUint(parts[0], 10, 64)
		index, err2 := strconv.Atoi(parts[1])
		if err1 != nil || err2 != nil {
			break
		}
		device := deviceText(c, netns, index)
		switch kind {
		case "offload":
			return fmt.Sprintf("offload %s of %s", show(parts[2]), device)
		case "threaded":
			return "threaded NAPI of " + device
		}
		return fmt.Sprintf("packet steering (rps_cpus) of queue %s of %s", show(parts[2]), device)
	case "kthread", "affinity", "slice":
		tid, rest, ok := strings.Cut(object, ":")
		if _, err := strconv.Atoi(tid); err != nil || !ok {
			break
		}
		switch kind {
		case "affinity":
			return "allowed CPUs of kernel thread " + tid
		case "slice":
			return "slice, in ns, of kernel thread " + tid
		}
		_, hierarchy, _ := strings.Cut(rest, ":")
		return fmt.Sprintf("control group of kernel thread %s in %s", tid, show(hierarchy))
	case "file":
		return show(object)
	}
	return show(kind) + " " + show(object)
}

// deviceText names a device in the container, or the other end of such a device.
func deviceText(c api.Container, netns uint64, index int) string {
	for _, i := range c.Interfaces {
		if c.NetNS != 0 && c.NetNS == netns && i.Index == index {
			return fmt.Sprintf("%s in the container", show(i.Name))
		}
		if i.Host != nil && i.Host.NetNS == netns && i.Host.Index == index {
			return fmt.Sprintf("%s, the other end of %s", show(i.Host.Name), show(i.Name))
		}
	}
	return fmt.Sprintf("device %d in network namespace %d", index, netns)
}
