package drop

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/fairlead-project/fairlead/internal/testkit"
)

// Neither a container's claims about itself nor a bridge's flooding causes drops of others'
// packets.
func TestEarlyDropForged(t *testing.T) {
	testkit.OnKernels(t)
	e := load(t)
	add := func() *Drops {
		w, err := e.add(another(e), 1)
		must(t, err)
		return w
	}
	at := func(w *Drops, mac string) *ebpf.Program {
		p, err := e.counter(w.slot, hardware(t, mac), 0)
		must(t, err)
		t.Cleanup(func() { p.Close() })
		return p.Program
	}
	to := func(mac, addr string) []byte {
		f := frame(addr)
		copy(f, hardware(t, mac))
		return f
	}
	const bad, good, host = "02:00:00:00:00:01", "02:00:00:00:00:02", lo
	driver := native(t, e, host)
	expect := func(what string, f []byte, want uint32) {
		t.Helper()
		for at, p := range map[string]*ebpf.Program{"uplink": e.tc, "driver": driver} {
			if v := run(t, p, f, 3); v != want {
				t.Errorf("%s, at the %s: verdict %d, want %d", what, at, v, want)
			}
		}
	}
	// A tenant that has used up its limit.
	thief := add()
	thiefs := at(thief, bad)
	limit := func(last time.Duration) {
		t.Helper()
		limited(t, thief, 7, -1, last)
	}
	h := routes(t, map[string]string{"10.0.0.1": bad, "10.0.0.3": good, "fd00::1": bad, "fd00::3": good, "10.0.0.4": bad, "10.0.0.5": bad})
	for _, addr := range []string{"10.0.0.1", "fd00::1"} {
		h.sends(t, thiefs, to(bad, addr))
	}
	run(t, thiefs, to(good, "10.0.0.2"), 1) // flooded by the bridge, or attracted by frames with good's address
	for _, addr := range []string{"10.0.0.3", "fd00::3", "10.0.0.6", "10.1.0.1"} {
		h.sends(t, thiefs, to(bad, addr)) // by forged ARP, or by an accomplice on the bridge
	}
	limit(time.Hour)
	expect("its own", to(bad, "10.0.0.1"), tcxDrop)
	expect("its own, routed by the host", to(host, "10.0.0.1"), tcxDrop)
	expect("its own, IPv6", to(host, "fd00::1"), tcxDrop)
	expect("another's that was flooded", to(good, "10.0.0.2"), tcxNext)
	expect("another's that was flooded, routed", to(host, "10.0.0.2"), tcxNext)
	expect("another's, as soon as it is sent to him again", to(good, "10.0.0.3"), tcxNext)
	for _, addr := range []string{"10.0.0.3", "fd00::3", "10.0.0.6", "10.1.0.1"} {
		expect("another's, routed by the host: "+addr, to(host, addr), tcxNext)
	}

	// An address with packets to two tenants is dropped for neither, from either side.
	limit(-time.Second)
	victim := at(add(), good)
	for _, first := range []struct {
		p    *ebpf.Program
		mac  string
		then *ebpf.Program
		mac2 string
		addr string
	}{{thiefs, bad, victim, good, "10.0.0.4"}, {victim, good, thiefs, bad, "10.0.0.5"}} {
		limit(-time.Second)
		h.sends(t, first.p, to(first.mac, first.addr))
		h.sends(t, first.then, to(first.mac2, first.addr))
		limit(time.Hour)
		for _, mac := range []string{bad, good, host} {
			expect("contested "+first.addr+" by "+mac, to(mac, first.addr), tcxNext)
		}
	}

	// Once the first has got no packets for it for a while, it is the second's.
	var key dropFlAddress
	copy(key.Ip[10:], []byte{0xff, 0xff, 10, 0, 0, 5})
	var o dropOwner
	must(t, e.maps.FlAddresses.Lookup(key, &o))
	o.Seen -= min(o.Seen, uint64(2*time.Second))
	must(t, e.maps.FlAddresses.Put(key, o))
	limit(-time.Second)
	h.sends(t, thiefs, to(bad, "10.0.0.5"))
	limit(time.Hour)
	expect("taken over", to(bad, "10.0.0.5"), tcxDrop)
	expect("taken over, routed", to(host, "10.0.0.5"), tcxDrop)
}
