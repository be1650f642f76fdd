package traffic_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/policy"
)

// each calls fn with all BPF objects of a kind in the kernel.
func each[ID ~uint32, O io.Closer](t testing.TB, next func(ID) (ID, error), open func(ID) (O, error), fn func(O)) {
	t.Helper()
	for id, err := next(0); !errors.Is(err, os.ErrNotExist); id, err = next(id) {
		must(t, err)
		o, err := open(id)
		if errors.Is(err, os.ErrNotExist) { // it has just gone
			continue
		}
		must(t, err)
		fn(o)
		must(t, o.Close())
	}
}

// meters returns the number of programs that measure delays.
func meters(t *testing.T) (n int) {
	t.Helper()
	each(t, ebpf.ProgramGetNextID, ebpf.NewProgramFromID, func(p *ebpf.Program) {
		info, err := p.Info()
		if must(t, err); info.Name == "fl_enqueue" {
			n++
		}
	})
	return n
}

// metersAre waits for that number: the kernel frees programs later.
func metersAre(t *testing.T, want int, when string) {
	t.Helper()
	until(t, fmt.Sprintf("%s: %d programs", when, want), func() (string, bool) { n := meters(t); return fmt.Sprint(n), n == want })
}

// delaysOf returns the histogram of a container at the uplink; nil: there is none.
func (h *host) delaysOf(id container.ID) *hist.Classic {
	for _, s := range h.traffic.Snapshot().Samples {
		if s.Container == id && s.Name == "traffic_delay_seconds" && s.Device == "nic0" && slices.Contains(s.Labels, feature.Label{Name: "direction", Value: "egress"}) {
			return s.Histogram.Classic
		}
	}
	return nil
}

// The programs that always measure come with the first class and go with the last; a class that is
// made anew begins at zero. TestDelays shows that what they measure is right.
func TestDelaysAlways(t *testing.T) {
	testkit.InFull(t)
	before := meters(t)
	h := newHost(t, gbit)
	h.delays = true
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	_, q := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	metersAre(t, before, "nobody is shaped")
	must(t, h.apply(c, policy.Net{Weight: 1}))
	must(t, h.apply(q, policy.Net{Weight: 1}))
	metersAre(t, before+1, "two are shaped")
	h.resolve(box, h.wire, "10.66.0.1:9000")
	h.send(box, "10.66.0.1:9000")
	// A kernel may run no BPF program while some process is current.
	if is := h.delaysOf(c.ID); is == nil || is.Count < datagrams*9/10 || h.delaysOf(0) == nil {
		t.Fatalf("%+v", h.traffic.Snapshot())
	}

	// A caller gets exactly what is sent meanwhile, from the same programs.
	type answer struct {
		traffic.Reading
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		m, err := h.traffic.Measure(t.Context(), 300*time.Millisecond)
		answers <- answer{m, err}
	}()
	h.send(box, "10.66.0.1:9000")
	programs := meters(t)
	asked := <-answers
	must(t, errors.Join(asked.err, asked.Err))
	i := slices.IndexFunc(asked.Rows, func(r traffic.Row) bool { return r.Container == api.ID(c.ID) && r.Uplink == "nic0" })
	if i < 0 || asked.Rows[i].Delays == nil {
		t.Fatalf("no delays: %+v", asked.Rows)
	}
	if got := asked.Rows[i].Delays.Count(); got > datagrams+5 || programs != before+1 {
		t.Errorf("of %d packets who asks is told of %d, by %d programs", datagrams, got, programs-before)
	}

	// It ends with the class, and with the last of them.
	must(t, h.traffic.Remove(t.Context(), c.ID))
	if got := h.delaysOf(c.ID); got != nil {
		t.Errorf("without policy: %+v", got)
	}
	must(t, h.apply(c, policy.Net{Weight: 2}))
	if got := h.delaysOf(c.ID); got == nil || got.Count > 5 {
		t.Errorf("anew: %+v", got)
	}
	must(t, h.traffic.Remove(t.Context(), c.ID))
	must(t, h.traffic.Remove(t.Context(), q.ID))
	metersAre(t, before, "nobody is shaped any more")
	must(t, h.apply(c, policy.Net{Weight: 2}))
	metersAre(t, before+1, "one is shaped again")
	must(t, h.traffic.Close())
	metersAre(t, before, "closed")
}

// stamps returns how many packets have a stamp, or had one when they were lost.
func stamps(t testing.TB) (n int) {
	t.Helper()
	each(t, ebpf.MapGetNextID, ebpf.NewMapFromID, func(m *ebpf.Map) {
		if info, err := m.Info(); err == nil && info.Name == "fl_queued" {
			var index uint32
			var row [16]uint64 // eight packets, and their arrival times
			for it := m.Iterate(); it.Next(&index, &row); {
				for _, skb := range row[:8] {
					if skb != 0 {
						n++
					}
				}
			}
		}
	})
	return n
}

// A container gives a qdisc of its own our handle, and keeps packets in it: they take no room among
// the measured packets.
func TestDelaysForged(t *testing.T) {
	testkit.InFull(t)
	h := newHost(t, gbit)
	h.delays = true
	h.bridge()
	bad, liar := h.add("one", "10.66.0.2/24", h.ns)
	h.listen()
	h.start()
	must(t, h.apply(liar, policy.Net{Weight: 1}))
	h.resolve(bad, h.wire, "10.66.0.1:9000")
	h.Change(bad, "eth0", func(n *netlink.Handle, l netlink.Link) error {
		return forgeRoot(n, l, 8000)
	})
	before := stamps(t)
	h.send(bad, "10.66.0.1:9000")
	if after := stamps(t); after > before+5 {
		t.Errorf("%d stamps, %d before its packets", after, before)
	}
}
