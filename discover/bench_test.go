package discover

import (
	"fmt"
	"testing"
	"time"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// BenchmarkRounds measures what 100 containers, each with a network of its own, cost the agent: a
// round caused by an event of another one, and a refresh, which comes twice a minute.
func BenchmarkRounds(b *testing.B) {
	cg := testkit.Cgroup(b)
	host := testkit.NetNS(b)
	rep := []reported{{status: SourceStatus{Name: "docker"}}}
	for i := range 100 {
		ns := testkit.NetNS(b)
		testkit.Veth(b, ns, "eth0", host, fmt.Sprintf("fl%d", i))
		cmd := ns.Start(b, "sleep", "1000")
		cg.Child(b, fmt.Sprint(i)).Add(b, cmd.Process.Pid)
		rep[0].records = append(rep[0].records, Record{PID: cmd.Process.Pid, RuntimeID: fmt.Sprint(i)})
	}
	host.Bind(b)
	layout, err := cgroup.Detect("/proc", "")
	if err != nil {
		b.Fatal(err)
	}
	r, err := newRounds(NewSet(Config{}).cfg, layout, func() {})
	if err != nil {
		b.Fatal(err)
	}
	defer r.close()
	full := func() {
		for next := r.run(rep, true); next == 0; {
			next = r.run(rep, false)
		}
	}
	for start := time.Now(); len(r.live) < 100; full() {
		if time.Since(start) > 10*time.Second {
			b.Fatalf("%d containers", len(r.live))
		}
	}
	for _, e := range r.live {
		if e.container.Interfaces[0].Host.NetNS != host.Inode {
			b.Fatalf("host end: %+v", e.container)
		}
	}
	b.Run("event", func(b *testing.B) {
		for b.Loop() {
			r.run(rep, false)
		}
	})
	b.Run("refresh", func(b *testing.B) {
		for b.Loop() {
			full()
		}
	})
}
