package latency

import (
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/lab/sandbox"
)

// stamps gives a test what is in the kernel of packets under way.
func (h *host) stamps() (keys *ebpf.Variable, stamps *ebpf.Map) {
	h.T.Helper()
	var maps struct {
		Keys   *ebpf.Variable `ebpf:"fl_keys"`
		Stamps *ebpf.Map      `ebpf:"fl_stamps"`
	}
	must(h.T, h.f.meter.object.Load(&maps, nil))
	return maps.Keys, maps.Stamps
}

func now(t *testing.T) uint64 {
	t.Helper()
	var ts unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
	return uint64(ts.Nano())
}

// Where every place is taken, the oldest stamp of a row makes room and is counted. New
// packets are measured all the same.
func TestFull(t *testing.T) {
	h, web, c := newWeb(t)
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", 1)
	h.settled(c, UDP, Egress, 1)
	before := h.read(c).Of(Egress, UDP)
	keys, stamps := h.stamps()
	of := latencyStamp{Slot: uint32(h.f.of(c.ID).slot), Protocol: uint8(UDP)}
	of.At[0] = now(t)
	places := int(stamps.MaxEntries())
	for i := range places {
		must(t, stamps.Put(uint32(i), of))
	}
	taken := make([]uint64, places)
	for i := range taken {
		taken[i] = 8 * uint64(i+1) // of no skb
	}
	must(t, keys.Set(taken))
	h.ask(web, h.wire, "udp", "10.66.0.1:9001", packets)
	h.settled(c, UDP, Egress, before.Matched+packets)
	if got := h.read(c).Of(Egress, UDP).Evicted - before.Evicted; got == 0 || got > 4*packets {
		t.Errorf("%d stamps made room for %d requests", got, packets)
	}
}

// Records for which the buffer has no room are counted as lost, and histograms go on.
func TestLost(t *testing.T) {
	h, web, c := newWeb(t)
	h.f.mu.Lock()
	h.f.of(c.ID).traced = true // without a reader
	err := h.f.follow()
	h.f.mu.Unlock()
	must(t, err)
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9000", "--size", "64")
	h.await(func() string {
		r, err := h.f.Read()
		must(t, err)
		if cov := r.Tenants[0].Of(Egress, UDP); r.Lost == 0 || cov.Matched < r.Lost {
			return fmt.Sprintf("%d lost, %+v", r.Lost, cov)
		}
		return ""
	})
}

// held has packets wait at the uplink, and gives where their stamps are.
func (h *host) held(web *sandbox.Box, c container.Container) (at []uint32, stamps *ebpf.Map) {
	h.T.Helper()
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", 1) // addresses are known from here on
	h.settled(c, UDP, Egress, 1)
	h.hold(h.ns, "nic0")
	_, stamps = h.stamps()
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9001", "--count", "6", "--size", "1000")
	h.await(func() string {
		at = nil
		var s latencyStamp
		for i := range stamps.MaxEntries() {
			must(h.T, stamps.Lookup(i, &s))
			if s.At[3] > s.At[0] && s.Slot != 0 && s.Protocol == uint8(UDP) {
				at = append(at, i)
			}
		}
		if n := h.read(c).Of(Egress, UDP).Seen; n < 7 {
			return fmt.Sprintf("%d packets of 7 were sent", n)
		}
		return ""
	})
	return at, stamps
}

// A stamp that turns out to be another packet's, as of an skb that was used again, is
// counted as that, and its times nowhere.
func TestReused(t *testing.T) {
	h, web, c := newWeb(t)
	at, stamps := h.held(web, c)
	var s latencyStamp
	for _, i := range at {
		must(t, stamps.Lookup(i, &s))
		s.Check ^= 2
		must(t, stamps.Put(i, s))
	}
	h.await(func() string {
		cov := h.read(c).Of(Egress, UDP)
		if cov.Mismatched == 0 {
			return fmt.Sprintf("no packet has another's stamp: %+v", cov)
		}
		if n := h.read(c).Histogram(Egress, Added, UDP).Count(); n != cov.Matched {
			t.Fatalf("%d packets in the histogram, %+v", n, cov)
		}
		return ""
	})
}

// What is under way while the programs are detached is not believed afterwards.
func TestInterrupted(t *testing.T) {
	h, web, c := newWeb(t)
	h.held(web, c)
	h.f.mu.Lock()
	err := h.f.meter.rest()
	before := h.f.of(c.ID).slot
	all, rerr := h.f.meter.read(before)
	if err == nil {
		err = h.f.meter.resume()
	}
	h.f.mu.Unlock()
	must(t, err)
	must(t, rerr)
	h.await(func() string {
		cov := h.read(c).Of(Egress, UDP)
		if cov.Matched > all[Egress][UDP].Matched {
			t.Fatalf("packets that were under way are matched: %+v", cov)
		}
		if cov.Unsampled == 0 {
			return fmt.Sprintf("no packet has left: %+v", cov)
		}
		return ""
	})
}

// A flood of a container that is recorded takes no more than its share of the records of a
// second: the rest is counted, and costs the agent nothing.
func TestRecordsOfAFlood(t *testing.T) {
	h, web, c := newWeb(t)
	const each = 335 // MOST_TOLD, in 2^24 ns
	began := time.Now()
	_, ok, err := h.f.Trace(t.Context(), c.ID, false, api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}, 1, 0)
	if must(t, err); !ok {
		t.Fatal("not measured")
	}
	h.Load(h.wire, nil, "udp-recv", "--listen", "10.66.0.1:9000")
	h.Load(web, nil, "udp-send", "--to", "10.66.0.1:9000", "--size", "64")
	h.await(func() string {
		out, _, err := h.f.Trace(t.Context(), c.ID, false, api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}, 1, 0)
		must(t, err)
		windows := uint64(time.Since(began)>>24) + 2
		if given := out.Next - 1; given > each*windows {
			t.Fatalf("%d records in %d windows of time, want at most %d in each", given, windows, each)
		}
		if out.Lost < 1000 {
			return fmt.Sprintf("%d records, %d lost", out.Next-1, out.Lost)
		}
		return ""
	})
}
