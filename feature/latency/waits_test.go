package latency

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
	"github.com/fairlead-project/fairlead/kernel/netdev"
	"github.com/fairlead-project/fairlead/kernel/sched"
)

// rawWait is a wait as the kernel gives it.
func rawWait(t testing.TB, change func(*latencyWaited)) []byte {
	t.Helper()
	k := latencyWaited{Id: 7, Ns: 9000, Stage: uint32(Deliver), Parts: 1}
	k.Part[0].Kind, k.Part[0].Who, k.Part[0].Ns = doesPacket, 1<<32|2, 5000
	if change != nil {
		change(&k)
	}
	var out bytes.Buffer
	must(t, binary.Write(&out, binary.NativeEndian, &k))
	return out.Bytes()[:waitedHead+waitedPart*min(int(k.Parts), len(k.Part))]
}

func FuzzParseWait(f *testing.F) {
	f.Add(rawWait(f, nil))
	f.Add(rawWait(f, func(k *latencyWaited) { k.Parts = 1 << 31 }))
	f.Add(rawWait(f, func(k *latencyWaited) { k.Stage = 99 }))
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, w, err := parseWait(b); err == nil {
			(&attribution{}).wire(w, Ingress, nil)
		}
	})
}

// Parts of one container are added up, the three largest are listed, and the rest is unknown.
func TestWaitBy(t *testing.T) {
	a, b := container.Container{ID: 1, Name: "a"}, container.Container{ID: 2, Name: "b"}
	o := &attribution{
		devices: map[uint64]container.Container{11: a, 22: b},
		groups:  map[string]container.Container{"/sys/fs/cgroup/b": b},
		root:    "/sys/fs/cgroup",
		paths:   map[uint64]string{5: "/sys/fs/cgroup/b/inner", 6: "/sys/fs/cgroup/system.slice"},
	}
	w := wait{stage: Deliver, all: 100, parts: []waitPart{
		{kind: doesPacket, who: 11, ns: 10}, {kind: doesPacket, who: 33, last: 11, ns: 10}, // of a, by either end
		{kind: doesTask, who: 5, ns: 30}, {kind: doesTask, who: 6, ns: 25}, {kind: doesIdle, ns: 5},
	}}
	got := o.wire(w, Ingress, []container.ID{1})
	want := []api.LatencyCulprit{
		{Work: "tasks", Container: 2, Name: "b", Seconds: 30e-9},
		{Work: "tasks", Cgroup: "/system.slice", Seconds: 25e-9},
		{Work: "packets", Container: 1, Name: "a", Own: true, Seconds: 20e-9},
	}
	if got.Stage != "deliver" || fmt.Sprint(got.By) != fmt.Sprint(want) || got.Unknown < 24e-9 || got.Unknown > 26e-9 {
		t.Errorf("got %+v\nwant %+v and 25 ns not known", got, want)
	}
}

// A wait comes into the record of its packet, and into no other's.
func TestWaitOfRecord(t *testing.T) {
	tr := newTraces()
	mine := tr.want(3, 0, api.LatencyFilter{}, time.Now(), lease)
	tr.take(rawWait(t, nil))
	tr.take(raw(t, func(k *latencyRecord) { k.Id = 8 }))
	tr.take(raw(t, nil))
	list, _, _, _ := tr.after(mine, 0, maxRecords)
	if len(list) != 2 || len(list[0].waits) != 0 || len(list[1].waits) != 1 || list[1].waits[0].all != 9000 || len(tr.waits) != 0 {
		t.Errorf("%+v, kept %v", list, tr.waits)
	}
}

// A wait is as long as it was, also one of more than 2^32 ns.
func TestLongWait(t *testing.T) {
	const long = 10 * time.Second
	_, w, err := parseWait(rawWait(t, func(k *latencyWaited) { k.Ns, k.Part[0].Ns = uint64(long), uint64(long) }))
	must(t, err)
	if w.all != long || w.parts[0].ns != long {
		t.Errorf("a wait of %v: %+v", long, w)
	}
}

// A packet in the backlog of a CPU waits for another container's packets there. A container that
// sends nothing is not named. The host is watched only while records are requested.
func TestBacklog(t *testing.T) {
	testkit.NeedRoot(t)
	if runtime.NumCPU() < 2 {
		testkit.Skip(t, "needs two CPUs")
	}
	h, web, c := newBridged(t)
	flood, fc := h.add("flood", "10.66.0.3/24", h.ns)
	h.f.cfg.Containers = topology.Containers{fc}
	h.measure(true, c)
	if h.f.meter.ran != nil {
		t.Error("what CPUs do is watched, though nobody asks for records")
	}
	h.Load(web, nil, "udp-recv", "--listen", "10.66.0.2:9000")
	h.Load(h.wire, []int{0}, "udp-send", "--to", "10.66.0.2:9000", "--rate", "500", "--size", "64")
	filter := api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}
	look := func(missing string, found func(r api.LatencyRecord) bool) {
		t.Helper()
		h.await(func() string {
			out, err := h.f.Command(t.Context(), &c, api.Ask{Body: filter, Over: time.Second})
			must(t, err)
			got := out.(api.LatencyRecords)
			filter.After = got.Next
			var last []api.LatencyWait
			for _, r := range got.Records {
				if r.Direction == "ingress" && found(r) {
					return ""
				}
				if len(r.Waits) > 0 {
					last = r.Waits
				}
			}
			return fmt.Sprintf("%s; %d records, the last wait %+v", missing, len(got.Records), last)
		})
	}
	look("no packet comes that waits for no other container", func(r api.LatencyRecord) bool {
		for _, w := range r.Waits {
			for _, by := range w.By {
				if by.Container == api.ID(fc.ID) {
					t.Fatalf("a container that sends nothing is named: %+v", w)
				}
			}
		}
		return r.Added != nil
	})
	// CPU 1 has the backlog of both.
	for _, dev := range []string{"nic0", "hflood"} {
		must(t, h.ns.SetQueues(dev, "rx", "rps_cpus", func(int) string { return "2" }))
	}
	h.Load(flood, []int{0}, "udp-send", "--to", "10.66.0.1:7", "--size", "64")
	look("no wait was for the packets of flood", func(r api.LatencyRecord) bool {
		for _, w := range r.Waits {
			for _, by := range w.By {
				if by.Container == api.ID(fc.ID) && by.Work == api.LatencyPackets && !by.Own {
					return true
				}
			}
		}
		return false
	})
}

// However many waits have come without a record, the next record has its wait, and the others are
// counted.
func TestWaitsOfStrangers(t *testing.T) {
	tr := newTraces()
	mine := tr.want(3, 0, api.LatencyFilter{}, time.Now(), lease)
	for id := range uint64(maxRecords) {
		tr.take(rawWait(t, func(k *latencyWaited) { k.Id = 1000 + id }))
	}
	tr.take(rawWait(t, nil))
	tr.take(raw(t, nil))
	if list, _, _, _ := tr.after(mine, 0, maxRecords); len(list) != 1 || len(list[0].waits) != 1 {
		t.Errorf("%+v, want one record with its wait", list)
	}
	if got := tr.orphans + uint64(len(tr.waits)); got != maxRecords {
		t.Errorf("%d waits without a record are accounted for, want %d", got, maxRecords)
	}
}

// Waits of other containers' packets at the uplink do not reach user space, and take no room from waits
// of the container that asks.
func TestWaitsBesideFlood(t *testing.T) {
	testkit.NeedRoot(t)
	if runtime.NumCPU() < 2 {
		testkit.Skip(t, "needs two CPUs")
	}
	h, web, c := newBridged(t)
	other, _ := h.add("other", "10.66.0.3/24", h.ns)
	h.f.cfg.Containers = topology.Containers{}
	h.measure(true, c)
	must(t, h.ns.SetQueues("nic0", "rx", "rps_cpus", func(int) string { return "2" }))
	h.Load(web, nil, "udp-recv", "--listen", "10.66.0.2:9000")
	h.Load(other, nil, "udp-recv", "--listen", "10.66.0.3:9000")
	h.Load(h.wire, []int{0}, "udp-send", "--to", "10.66.0.2:9000", "--rate", "500", "--size", "64")
	h.Load(h.wire, []int{0}, "udp-send", "--to", "10.66.0.3:9000", "--size", "64")
	var maps struct {
		Tickets *ebpf.Variable `ebpf:"fl_tickets"`
	}
	must(t, h.f.meter.object.Load(&maps, nil))
	filter := api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}
	seen, told := 0, 0
	h.await(func() string {
		got, _, err := h.f.Trace(t.Context(), c.ID, false, filter, maxRecords, time.Second)
		must(t, err)
		filter.After = got.Next
		for _, r := range got.Records {
			seen++
			for _, w := range r.waits {
				if w.stage == First {
					told++
				}
			}
		}
		var tickets [2]uint32
		must(t, maps.Tickets.Get(&tickets))
		if tickets[Ingress] < 10*maxRecords || told < 10 {
			return fmt.Sprintf("of %d records %d have waited at the uplink, of %d packets there; %d waits were lost", seen, told, tickets[Ingress], got.LostWaits)
		}
		return ""
	})
	h.f.tracer.mu.Lock()
	defer h.f.tracer.mu.Unlock()
	if h.f.tracer.orphans > 0 {
		t.Errorf("%d waits came whose packet nobody has recorded", h.f.tracer.orphans)
	}
}

// What waits for the thread that polls a container's device, on a CPU that has other work,
// shows in the stage before that device, and in no other of the same packet.
func TestThread(t *testing.T) {
	h, web, c := newWeb(t)
	others, err := sched.Threads("/proc", "napi/eth0")
	must(t, err)
	outside, inside := h.Open(h.ns), h.Open(web)
	dev := c.Interfaces[0]
	// So a veth polls.
	must(t, inside.Offload(dev.Index, netdev.GRO).Write(netdev.GRO.On()))
	must(t, outside.Offload(dev.Host.Index, netdev.TSO).Write(netdev.Off))
	must(t, inside.Threaded(dev.Index).Write("1"))

	var one unix.CPUSet
	allowed, err := cpus()
	must(t, err)
	one.Set(allowed)
	threads := 0
	h.await(func() string {
		list, err := sched.Threads("/proc", "napi/eth0")
		must(t, err)
		for _, th := range list {
			if slices.Contains(others, th) {
				continue
			}
			must(t, unix.SchedSetaffinity(th.TID, &one))
			must(t, unix.SchedSetAttr(th.TID, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0))
			threads++
		}
		if threads == 0 {
			return fmt.Sprintf("no thread polls eth0: %+v", list)
		}
		return ""
	})
	hog, _ := h.add("hog", "10.66.0.4/24", h.ns)
	hc := h.Describe(hog)
	h.f.cfg.Containers = topology.Containers{hc}
	h.Load(hog, []int{allowed}, "burn")

	h.Load(web, nil, "udp-recv", "--listen", "10.66.0.2:9000")
	h.Load(h.wire, nil, "udp-send", "--to", "10.66.0.2:9000", "--rate", "100", "--size", "64")
	filter := api.LatencyFilter{Protocol: api.LatencyUDP, Port: 9000}
	var missing string
	h.await(func() string {
		got, _, err := h.f.Trace(t.Context(), c.ID, false, filter, maxRecords, time.Second)
		must(t, err)
		filter.After = got.Next
		var longest Record
		for _, r := range got.Records {
			if r.Direction != Ingress {
				continue
			}
			waited := r.Stages[Deliver]
			if waited >= 2*time.Millisecond && r.Stages[Added]-waited < time.Millisecond {
				for _, w := range r.waits {
					by := h.f.attribution().wire(w, Ingress, []container.ID{c.ID}).By
					if w.stage == Deliver && len(by) > 0 && by[0].Container == api.ID(hc.ID) && by[0].Work == api.LatencyTasks && !by[0].Own {
						return ""
					}
					missing = fmt.Sprintf("%+v", by)
				}
			}
			if waited > longest.Stages[Deliver] {
				longest = r
			}
		}
		return fmt.Sprintf("no packet has waited for the thread alone; of %d the longest: %v; the last wait was for %s", len(got.Records), longest.Stages, missing)
	})
}

// cpus gives a CPU on which this process may run.
func cpus() (int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, err
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("this process may run nowhere")
}
