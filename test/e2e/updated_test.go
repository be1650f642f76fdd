package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/block"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// testUpdated updates a container whose limits policy tightens. The engine then writes its own
// limits again. Ours must be back a moment later, and the engine's at the end.
func (h *host) testUpdated(t *testing.T) {
	defer h.with(t)()
	disk := testkit.NewDisk(t, 4<<20)
	d, err := block.Open("/sys", disk.Path)
	must(t, err)
	h.sleeper(t, "updated", "--cpus", "1", "--device-write-bps", disk.Path+":10mb",
		"--label", "fairlead.io.yield=quota", "--label", "fairlead.io.max="+disk.Path+" wbps=2mb")
	c := h.agent.stands("updated", "netcpu", api.StateDone)
	holds := func(when string, quota time.Duration, bytes string) {
		t.Helper()
		await(t, fmt.Sprintf("%s: a quota of %v and %s bytes/s", when, quota, bytes), func() error {
			now, err := cgroup.ReadBandwidth(c.Cgroup.CPU)
			if err != nil || now.Quota != quota {
				return fmt.Errorf("%+v, %v", now, err)
			}
			for _, l := range cgroup.Throttle(c.Cgroup.IO, c.Cgroup.IO == c.Cgroup.V2, d.Number(), cgroup.Limits{WriteBytes: 1}) {
				if v, err := l.Read(); l.Value != "" && (err != nil || v != bytes) {
					return fmt.Errorf("%s: %q, %v", l.Ref().Object, v, err)
				}
			}
			return nil
		})
	}
	const period = 100 * time.Millisecond
	holds("at first", period/5, "2097152")
	h.Must(t, "update", "--cpus", "0.5", "updated")
	holds("updated", period/5, "2097152")
	h.Must(t, "update", "--cpus", "0.1", "updated")
	holds("stricter than ours", period/10, "2097152")
	h.Must(t, "update", "--cpus", "0.6", "updated")
	holds("laxer again", period/5, "2097152")
	h.agent.run("set", "updated", "io.yield=off", "io.max="+disk.Path+" wbps=100mb") // on v1 it says that buffered writes pass
	holds("without ours", 6*period/10, "10485760")
	h.remove(t, "updated")
}
