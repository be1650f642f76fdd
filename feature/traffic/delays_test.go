package traffic_test

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/feature"
	"github.com/fairlead-project/fairlead/feature/traffic"
	"github.com/fairlead-project/fairlead/feature/traffic/delay"
	"github.com/fairlead-project/fairlead/hist"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/lab/load"
	"github.com/fairlead-project/fairlead/lab/sandbox"
	"github.com/fairlead-project/fairlead/policy"
	"github.com/fairlead-project/fairlead/tenant/identity"
)

// eachProgram calls fn with all BPF programs in the kernel.
func eachProgram(t testing.TB, fn func(*ebpf.ProgramInfo, *ebpf.Program)) {
	t.Helper()
	for id := ebpf.ProgramID(0); ; {
		next, err := ebpf.ProgramGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return
		}
		must(t, err)
		id = next
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, os.ErrNotExist) { // it has just gone
			continue
		}
		must(t, err)
		info, err := p.Info()
		must(t, err)
		fn(info, p)
		must(t, p.Close())
	}
}

// meters returns the number of programs that measure delays.
func meters(t *testing.T) (n int) {
	t.Helper()
	eachProgram(t, func(info *ebpf.ProgramInfo, _ *ebpf.Program) {
		if info.Name == "fl_enqueue" {
			n++
		}
	})
	return n
}

// metersAre waits for that number: the kernel frees programs later.
func metersAre(t *testing.T, want int, when string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		got := meters(t)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %d programs time packets, want %d", when, got, want)
		}
	}
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

// TestDelaysAlways compares the histogram for the metrics with how long the datagrams really took.
func TestDelaysAlways(t *testing.T) {
	testkit.InFull(t)
	const n = 200
	before := meters(t)
	h := newHost(t, 2*mbit) // as in TestDelays
	h.delays = true
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	quiet, q := h.add("two", "10.66.0.3/24", h.ns)
	h.listen()
	h.start()
	metersAre(t, before, "nobody is shaped")
	must(t, h.apply(c, policy.Net{Weight: 1}))
	must(t, h.apply(q, policy.Net{Weight: 1}))
	metersAre(t, before+1, "two are shaped")
	for _, b := range []*sandbox.Box{box, quiet} {
		must(t, b.Sysctl("ipv6/conf/all/disable_ipv6", "1")) // IPv6 sends packets by itself
		h.resolve(b, h.wire, "10.66.0.1:9000")
	}

	h.emptied(c)
	was := h.delaysOf(c.ID)
	if was == nil || h.delaysOf(0) == nil {
		t.Fatalf("no histogram: %+v", h.traffic.Snapshot())
	}
	sent := h.burst(box, n)
	is := h.delaysOf(c.ID)
	got := int(is.Count - was.Count)
	if len(sent.took) != n || got < n*9/10 || got > n+5 {
		t.Fatalf("of %d datagrams %d came; %d waited", n, len(sent.took), got)
	}
	missing, low, high := max(0, n-got), time.Duration(0), 5*sent.took[n-1]
	for k, took := range sent.took {
		if high += took; k < n-missing {
			low += sent.floor(k)
		}
	}
	if sum := is.Sum - was.Sum; sum < low.Seconds() || sum > high.Seconds() {
		t.Errorf("they waited %.3f s in all, the datagrams from %v to %v", sum, low, high)
	}
	shortest, longest := is.Buckets[0].Le, is.Buckets[len(is.Buckets)-1].Le
	if shortest > 20e-6 || longest < 4 || !slices.IsSortedFunc(is.Buckets, func(a, b hist.Bound) int { return int(a.Count) - int(b.Count) }) {
		t.Errorf("buckets %+v", is.Buckets)
	}
	for i, b := range is.Buckets {
		least, most := -missing, 5
		for k, took := range sent.took {
			if took.Seconds() <= b.Le {
				least++
			}
			if sent.floor(k).Seconds() <= b.Le {
				most++
			}
		}
		if got := int(b.Count - was.Buckets[i].Count); got < least || got > most {
			t.Errorf("%d waited for up to %.4f s, and %d to %d of the datagrams did", got, b.Le, least, most)
		}
	}

	// A caller gets exactly what is sent meanwhile, from the same programs.
	type answer struct {
		traffic.Measured
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
	i := slices.IndexFunc(asked.Rows, func(r traffic.Row) bool { return r.Container == c.ID && r.Uplink == "nic0" })
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
	for id := ebpf.MapID(0); ; {
		next, err := ebpf.MapGetNextID(id)
		if errors.Is(err, os.ErrNotExist) {
			return n
		}
		must(t, err)
		id = next
		m, err := ebpf.NewMapFromID(id)
		if errors.Is(err, os.ErrNotExist) { // it has just gone
			continue
		}
		must(t, err)
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
		must(t, m.Close())
	}
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

// BenchmarkDelays measures the cost of delays, off and on in turns: how many small datagrams one
// sender sends, and what one TCP connection carries, both at the limit of their CPU; the median of
// pings; and how long the two programs run for each packet, by the kernel's statistics, which are a
// part of it.
func BenchmarkDelays(b *testing.B) {
	h := newHost(b, 100*gbit)
	h.bridge()
	box, c := h.add("one", "10.66.0.2/24", h.ns)
	h.listen()
	h.start()
	must(b, h.apply(c, policy.Net{Weight: 1}))
	got := h.run(h.wire, "tcp-recv", "--listen", ":9002")
	small := h.run(box, "udp-send", "--to", "10.66.0.1:9000", "--rate", "0", "--size", "100")
	bulk := h.run(box, "tcp-send", "--conns", "1", "--to", "10.66.0.1:9002")
	bulk.SetRate(0)
	own := delay.Class{NetNS: h.Open(h.ns).Inode(), Index: h.nic0, Minor: uint16(h.slots.Lookup(identity.TenantOf(c)))}
	during := func(sender, counts *load.Board) load.Window {
		sender.SetRate(load.Flood)
		time.Sleep(300 * time.Millisecond)
		was := counts.Read()
		time.Sleep(time.Second)
		w := counts.Read().Since(was)
		sender.SetRate(0)
		time.Sleep(300 * time.Millisecond)
		return w
	}
	var datagrams, rates, pings [2][]float64
	for b.Loop() {
		for round := range 10 {
			on := (round + round/2) % 2 // forwards, then backwards
			var m *delay.Meter
			if on == 1 {
				var err error
				m, err = delay.Open(own.NetNS, []delay.Class{own})
				must(b, err)
			}
			w := during(small, small)
			datagrams[on] = append(datagrams[on], float64(w.Ops)/w.Seconds/1e3)
			rates[on] = append(rates[on], during(bulk, got).BitRate()/gbit)
			took, err := ping(box, "10.66.0.1", 500)
			must(b, err)
			pings[on] = append(pings[on], float64(took[len(took)/2].Nanoseconds())/1e3)
			if m != nil {
				must(b, m.Close())
			}
		}
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	for on, name := range []string{"without", "with"} {
		b.ReportMetric(median(datagrams[on]), name+"-kpps")
		b.ReportMetric(median(rates[on]), name+"-Gbit/s")
		b.ReportMetric(median(pings[on]), name+"-ping-us")
	}
	m, err := delay.Open(own.NetNS, []delay.Class{own})
	must(b, err)
	defer m.Close()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	must(b, err)
	defer stats.Close()
	during(small, small)
	for _, name := range []string{"fl_enqueue", "fl_dequeue"} {
		spent, runs := runTime(b, name)
		b.ReportMetric(float64(spent.Nanoseconds())/float64(runs), "ns/"+name)
	}
}

// runTime returns how long the programs of a name have run, and how often.
func runTime(t testing.TB, name string) (spent time.Duration, runs uint64) {
	t.Helper()
	eachProgram(t, func(info *ebpf.ProgramInfo, p *ebpf.Program) {
		if info.Name != name {
			return
		}
		s, err := p.Stats()
		must(t, err)
		spent, runs = spent+s.Runtime, runs+s.RunCount
	})
	return spent, runs
}
