package latency

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/api"
	"github.com/fairlead-project/fairlead/container"
	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/internal/testkit/topology"
)

// raw is a record as the kernel gives it.
func raw(t testing.TB, change func(*latencyRecord)) []byte {
	t.Helper()
	var k latencyRecord
	k.At, k.Id, k.Slot = 1e9, 7, 3
	k.Flow.Family, k.Flow.Protocol, k.Flow.Len = 4, unix.IPPROTO_ICMP, 84
	copy(k.Flow.From[:], []byte{10, 0, 0, 1})
	copy(k.Flow.To[:], []byte{10, 0, 0, 2})
	k.Flow.Seq, k.Flow.ToPort = 8<<8, swap16(5)
	for i := range k.Stage {
		k.Stage[i] = ^uint64(0)
	}
	k.Stage[Added] = 1500
	if change != nil {
		change(&k)
	}
	var out bytes.Buffer
	must(t, binary.Write(&out, binary.NativeEndian, &k))
	return out.Bytes()
}

func TestParseRecord(t *testing.T) {
	at := time.Unix(1000, 0)
	r, s, kind, awaits, err := parseRecord(raw(t, nil), at)
	must(t, err)
	if s != 3 || kind != kindRecord || awaits || !r.At.Equal(time.Unix(1001, 0)) || r.Seq != 5 || r.Type != 8 || r.Bytes != 84 || r.Direction != Egress {
		t.Errorf("%+v of slot %d, kind %d, awaits %v", r, s, kind, awaits)
	}
	if r.From != netip.MustParseAddrPort("10.0.0.1:0") || r.To != netip.MustParseAddrPort("10.0.0.2:0") {
		t.Errorf("from %v to %v", r.From, r.To)
	}
	if r.Stages[Added] != 1500 || r.Stages[Stack] >= 0 {
		t.Errorf("stages %v", r.Stages)
	}
	r, _, _, _, err = parseRecord(raw(t, func(k *latencyRecord) {
		k.Flow.Family, k.Flow.Protocol, k.Direction = 6, unix.IPPROTO_TCP, 1
		k.Flow.FromPort, k.Flow.Seq, k.Flow.Flags = swap16(443), 99, 0x12
	}), at)
	must(t, err)
	if r.From.Port() != 443 || !r.From.Addr().Is6() || r.Seq != 99 || !r.Syn || r.Direction != Ingress {
		t.Errorf("%+v", r)
	}
}

// swap16 turns a number of the network's order around, as its bytes are read in ours.
func swap16(n uint16) uint16 { return n<<8 | n>>8 }

func FuzzParseRecord(f *testing.F) {
	f.Add(raw(f, nil))
	f.Add(raw(f, func(k *latencyRecord) { k.Direction = 9 }))
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, _, _, _, err := parseRecord(b, time.Time{})
		if err == nil && (r.Direction < 0 || r.Direction >= directions) {
			t.Fatalf("%+v", r)
		}
		wireRecord(r)
	})
}

// The times at the socket go into the record of the same packet. A record without them is kept
// after a while as it is. Tenants without a request have no records.
func TestTracer(t *testing.T) {
	tr := newTraces()
	mine := tr.want(3, 0, api.LatencyFilter{}, time.Now(), lease)
	_, from, _, _ := tr.after(mine, 0, maxRecords)
	awaited := func(k *latencyRecord) { k.Direction, k.Awaits = 1, 1 }
	tr.take(raw(t, awaited))
	if list, _, _, _ := tr.after(mine, from, maxRecords); len(list) != 0 {
		t.Fatalf("told before its socket: %+v", list)
	}
	tr.take(raw(t, func(k *latencyRecord) {
		k.Direction, k.Kind = 1, kindAtSocket
		k.Stage[Socket], k.Stage[Stack], k.At = 10, 2000, 1e9+10
	}))
	list, next, _, _ := tr.after(mine, from, maxRecords)
	if len(list) != 1 || list[0].Stages[Added] != 1500 || list[0].Stages[Stack] != 2000 || list[0].At.Sub(tr.zero) != 1e9+10 {
		t.Fatalf("%+v", list)
	}
	tr.take(raw(t, awaited))
	tr.flush(time.Now().Add(time.Hour))
	if list, _, _, _ := tr.after(mine, next, maxRecords); len(list) != 1 || list[0].Stages[Stack] >= 0 {
		t.Errorf("%+v", list)
	}
	tr.take(raw(t, func(k *latencyRecord) { k.Slot = 4 }))
	for range maxRecords + 10 {
		tr.take(raw(t, nil))
	}
	list, next, _, _ = tr.after(mine, 0, maxRecords)
	if len(list) > maxRecords || list[len(list)-1].number != next-1 || next != 1+2+maxRecords+10 {
		t.Errorf("%d records up to %d", len(list), next)
	}
	if some, more, _, _ := tr.after(mine, next-10, 4); len(some) != 4 || some[0].number != next-10 || more != next-6 {
		t.Errorf("of the last ten: %d, then %d", len(some), more)
	}
	if lapsed, left := tr.lapsed(time.Now().Add(time.Hour)); len(lapsed) != 1 || lapsed[3] != next || left != 0 {
		t.Errorf("lapsed: %v, left %d", lapsed, left)
	}
}

// Only records that match a filter are kept. A recording that was switched on continues until it is
// switched off; its records then stay for a while. A tenant that has ended leaves none.
func TestWanted(t *testing.T) {
	tr := newTraces()
	now := time.Now()
	count := func() int { list, _, _, _ := tr.after(tr.traces[3], 1, maxRecords); return len(list) }
	tr.want(3, 0, api.LatencyFilter{After: 9, Most: 2, Protocol: api.LatencyUDP}, now, lease)
	tr.take(raw(t, nil))
	tr.take(raw(t, func(k *latencyRecord) { k.Flow.Protocol = unix.IPPROTO_UDP }))
	testkit.Same(t, "records are kept", 1, count())
	tr.want(3, 0, api.LatencyFilter{}, now, longLease)
	if slots, left := tr.lapsed(now.Add(2 * lease)); len(slots) != 0 || left != 1 {
		t.Errorf("lapsed, though switched on: %v, %d left", slots, left)
	}
	tr.take(raw(t, nil))
	tr.unwant(3, now)
	tr.take(raw(t, nil))
	testkit.Same(t, "records are kept", 2, count())
	if slots, left := tr.lapsed(now.Add(2 * lease)); len(slots) != 1 || left != 1 || count() != 2 {
		t.Errorf("lapsed %v, %d traces left", slots, left)
	}
	tr.take(raw(t, func(k *latencyRecord) { k.Direction, k.Awaits = 1, 1 }))
	tr.forget(3)
	if len(tr.traces)+len(tr.waiting) != 0 {
		t.Errorf("%d traces and %d waiting of one that has gone", len(tr.traces), len(tr.waiting))
	}

	for port := range uint16(maxFilters + 5) {
		tr.want(3, 0, api.LatencyFilter{Port: port + 1}, now, lease)
	}
	tr.take(raw(t, nil))
	if n, filters := count(), len(tr.traces[3].wanted); n != 1 || filters > maxFilters+1 {
		t.Errorf("with more filters than are told apart: %d records, %d filters", n, filters)
	}
}

func TestWants(t *testing.T) {
	r := Record{Protocol: unix.IPPROTO_UDP, From: netip.MustParseAddrPort("10.0.0.2:4000"), To: netip.MustParseAddrPort("192.0.2.1:53")}
	peer := netip.MustParsePrefix
	for _, tt := range []struct {
		f    api.LatencyFilter
		want bool
	}{
		{api.LatencyFilter{}, true},
		{api.LatencyFilter{Protocol: "udp"}, true},
		{api.LatencyFilter{Protocol: "tcp"}, false},
		{api.LatencyFilter{Port: 53}, true},
		{api.LatencyFilter{Port: 4000}, true},
		{api.LatencyFilter{Port: 54}, false},
		{api.LatencyFilter{Peer: peer("192.0.2.0/24")}, true},
		{api.LatencyFilter{Peer: peer("192.0.3.0/24")}, false},
		{api.LatencyFilter{Peer: peer("fd00::/8")}, false},
		{api.LatencyFilter{Peer: peer("10.0.0.2/32")}, true},
		{api.LatencyFilter{Peer: peer("10.0.0.2/32"), Port: 54}, false},
	} {
		testkit.Same(t, fmt.Sprintf("%+v", tt.f), tt.want, wants(tt.f, &r))
	}
}

// Sampling chooses all packets of a flow, both ways, or none, and about one flow in the given number,
// whichever flows these are.
func TestSample(t *testing.T) {
	const flows, in = 4096, 16
	chosen := 0
	for port := range uint16(flows) {
		r := Record{Protocol: unix.IPPROTO_TCP, From: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.2"), 30000+port), To: netip.MustParseAddrPort("192.0.2.1:443")}
		back := Record{Protocol: r.Protocol, From: r.To, To: r.From, Seq: 7}
		f := api.LatencyFilter{Sample: in}
		if wants(f, &r) != wants(f, &back) {
			t.Fatalf("port %d: of one way alone", port)
		}
		if wants(f, &r) {
			chosen++
		}
	}
	if chosen < flows/in/2 || chosen > flows/in*2 {
		t.Errorf("%d of %d flows are chosen, want about 1 in %d", chosen, flows, in)
	}
}

// Packets are recorded while records are requested: with both ends, for the requested container
// only.
func TestTrace(t *testing.T) {
	h, web, c := newBridged(t)
	_, other := h.add("other", "10.66.0.3/24", h.ns)
	h.f.cfg.Containers = topology.Containers{}
	ask := func(of container.Container, f api.LatencyFilter, over time.Duration) api.LatencyRecords {
		t.Helper()
		out, err := h.f.Command(t.Context(), &of, api.Ask{Body: f, Over: over})
		must(t, err)
		return out.(api.LatencyRecords)
	}
	_, err := h.f.Command(t.Context(), &c, api.Ask{Body: api.LatencyFilter{}})
	var refused *api.Error
	if !errors.As(err, &refused) || refused.Status != http.StatusConflict {
		t.Errorf("a container that is not measured: %v", err)
	}
	h.measure(true, c, other)
	first, neighbour := ask(c, api.LatencyFilter{}, 0), ask(other, api.LatencyFilter{}, 0)
	testkit.Same(t, "records from before", 0, len(first.Records))
	const n = 20
	h.ask(web, h.wire, "udp", "10.66.0.1:9000", n)
	var list []api.LatencyRecord
	filter := api.LatencyFilter{After: first.Next, Protocol: api.LatencyUDP, Port: 9000, Peer: netip.MustParsePrefix("10.66.0.1/32")}
	h.await(func() string {
		r := ask(c, filter, time.Second)
		filter.After = r.Next
		list = append(list, r.Records...)
		if len(list) < 2*n {
			return fmt.Sprintf("%d records of %d: %+v", len(list), 2*n, h.read(c).Of(Ingress, UDP))
		}
		return ""
	})
	for _, r := range list {
		if r.Added == nil || r.Stack == nil || *r.Stack < *r.Added || r.Bytes != 92 {
			t.Errorf("%+v", r)
		}
	}
	if got := ask(other, api.LatencyFilter{After: neighbour.Next, Protocol: api.LatencyUDP}, 0); len(got.Records) != 0 {
		t.Errorf("the neighbour has %d records", len(got.Records))
	}
}
