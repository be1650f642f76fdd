package netdev_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// How a device receives: in softirq or in threads, and with or without XDP.
func TestHowADeviceReceives(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	p := newPair(t)
	want := func(when string, threads, xdp bool) {
		t.Helper()
		testkit.Gives(t, when+": polled by threads", threads)(p.inside.InThreads(p.eth0))
		testkit.Gives(t, when+": XDP", xdp)(p.inside.XDP(p.eth0))
	}
	want("new", false, false)
	must(t, errors.Join(p.inside.Offload(p.eth0, netdev.GRO).Write(netdev.GRO.On()), p.inside.Threaded(p.eth0).Write("1")))
	want("threaded", true, false)
	list, err := p.inside.NAPIs(p.eth0)
	if !errors.Is(err, netdev.ErrNoNAPIList) { // since 6.7
		must(t, err)
		if all, err := p.inside.NAPIs(0); err != nil || !slices.Equal(all, list) {
			t.Errorf("napi contexts of all devices: %+v, %v; want those of the only one, %+v", all, err, list)
		}
		if len(list) != 1 || list[0].Device != p.eth0 || list[0].ID == 0 || list[0].Thread == 0 {
			t.Errorf("napi contexts: %+v, want one with a thread", list)
		}
	}
	const pass = 2 // XDP_PASS
	program, err := testkit.Verdict(ebpf.XDP, "fl_test", pass)
	must(t, err)
	defer program.Close()
	var attached link.Link
	must(t, p.inside.Do(func() (err error) {
		attached, err = link.AttachXDP(link.XDPOptions{Interface: p.eth0, Program: program, Flags: link.XDPGenericMode})
		return err
	}))
	want("with XDP", true, true)
	must(t, attached.Close())
	want("without", true, false)
}
