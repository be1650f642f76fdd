package netcpu

import (
	"os"

	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
	"github.com/fairlead-project/fairlead/kernel/probe"
)

// needsHooks is the Mend of a kernel that can neither count nor drop packets early.
const needsHooks = "a kernel with BTF, and tcx (6.6 or later) or clsact"

// support reports what isolate can do on this host. Degraded means that isolate works, with a
// restriction that a user should know.
func support(roots kernel.Roots, l cgroup.Layout, throttled bool, noDrop error) probe.Verdict {
	switch {
	case os.Geteuid() != 0:
		return probe.Verdict{Level: probe.Unavailable, Why: "not root: threads and network devices of containers cannot be changed", Mend: "run the agent as root"}
	case l.CPU == "":
		return probe.Verdict{Level: probe.Unavailable, Why: "no cpu controller is mounted, so that nothing could charge a thread to a container", Mend: "mount the cpu controller"}
	case l.V2 == "":
		return probe.Verdict{Level: probe.Unavailable, Why: "no cgroup v2 tree is mounted, by which containers are told apart", Mend: "mount one, as hybrid hosts have it at " + roots.Cgroup + "/unified"}
	case noDrop != nil:
		return probe.Verdict{Level: probe.Degraded, Why: "packets of a container that is over its share are dropped at its own queue only, not at the uplink: " + noDrop.Error(), Mend: needsHooks}
	case !throttled:
		return probe.Verdict{Level: probe.Degraded, Why: "this kernel charges kernel threads but never throttles them: a container with a quota is held by a weight in proportion to it", Mend: "none is needed where neighbours have the usual weight"}
	}
	return probe.Verdict{Level: probe.Full}
}
