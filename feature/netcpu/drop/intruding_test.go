package drop

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel"
	"github.com/fairlead-project/fairlead/kernel/cgroup"
)

// Packets intrude that come in the time of neither their sender nor their receiver.
func TestIntruding(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	w, err := e.add(another(e), 1)
	must(t, err)
	const netns, port = 77, 5
	p, err := e.counter(w.slot, guestMAC(), netns)
	must(t, err)
	defer p.Close()
	layout, err := cgroup.Detect("/proc", kernel.Default().Cgroup)
	must(t, err)
	paths, err := layout.OfPID("/proc", os.Getpid())
	must(t, err)
	group, err := cgroup.ID(paths.V2)
	must(t, err)
	maps := e.cfg.Identity.Maps()
	from := func(ifindex uint32) (intruding uint64) {
		t.Helper()
		skb := make([]byte, 192) // struct __sk_buff
		binary.NativeEndian.PutUint32(skb[36:], ifindex)
		before, err := w.Counters()
		must(t, err)
		_, err = p.Run(&ebpf.RunOptions{Data: frame("10.0.0.1"), Context: skb})
		must(t, err)
		after, err := w.Counters()
		must(t, err)
		return after.Intruding - before.Intruding
	}
	const other, hostEnd = 9, 1 // FL_HOST_END
	for _, c := range []struct {
		name    string
		runs    uint32 // the tenant of this process; 0: none
		ifindex uint32 // where the packet came from; 0: from the host
		sender  [2]uint16
		want    uint64
	}{
		{"from the host, by a socket of the task that runs", 0, 0, [2]uint16{}, 0},
		{"from the host, while the receiver runs", w.slot, 0, [2]uint16{}, 0},
		{"while its sender runs", other, port, [2]uint16{other, hostEnd}, 0},
		{"while its receiver runs", w.slot, port, [2]uint16{other, hostEnd}, 0},
		{"while a third tenant runs", other, port, [2]uint16{other + 1, hostEnd}, 1},
		{"while a task of the host runs", 0, port, [2]uint16{other, hostEnd}, 1},
		{"from outside, while a tenant runs", other, port + 1, [2]uint16{other, hostEnd}, 1},
		{"from a device in the tenant's own namespace", other, port, [2]uint16{other, 0}, 1},
	} {
		must(t, maps["fl_cgroups"].Put(group, c.runs))
		must(t, maps["fl_devices"].Put([2]uint32{netns, port}, c.sender))
		if got := from(c.ifindex); got != c.want {
			t.Errorf("%s: %d intrude, want %d", c.name, got, c.want)
		}
	}
}
