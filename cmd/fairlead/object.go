package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/fairlead-project/fairlead/api"
)

// objectText names the object of a change in words: the journal's own name for
// a device is NETNS/INDEX/DETAIL and for a thread TID:START:HIERARCHY, which
// say little. What it does not know it gives as it is.
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

// deviceText names a device by its place: in the container, or as the other
// end of one that is.
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
