package netdev_test

import (
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// A watch of devices reports the device with a changed qdisc, which Watch ignores, and one that was
// set down.
func TestWatchDevices(t *testing.T) {
	testkit.OnKernels(t)
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	kit := testkit.NetNS(t)
	ns, err := netdev.Open(kit.Bind(t))
	must(t, err)
	defer ns.Close()
	h := kit.Handle(t)
	must(t, ns.IFB(77).Write(netdev.OurIFB))
	index, err := ns.Index(netdev.IFBName(77))
	must(t, err)
	told := make(chan int, 1000)
	stop, err := ns.WatchDevices(func(devices map[int]bool, _ bool) {
		for d := range devices {
			told <- d
		}
	})
	must(t, err)
	defer stop()
	hears := func(what string) {
		t.Helper()
		for {
			select {
			case d := <-told:
				if d == index {
					return
				}
			case <-time.After(time.Minute):
				t.Fatalf("nothing is told of %s", what)
			}
		}
	}
	tbf := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: 0x10000, Parent: netlink.HANDLE_ROOT}, Rate: 1e6, Limit: 30000, Buffer: 20000}
	must(t, h.QdiscAdd(tbf))
	hears("a qdisc")
	l, err := h.LinkByIndex(index)
	must(t, err)
	must(t, h.LinkSetDown(l))
	hears("a device")
	must(t, ns.RaiseIFB(77))
	if l, err = h.LinkByIndex(index); err != nil || l.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("it is not up again: %v", err)
	}
	if err := ns.RaiseIFB(78); err == nil {
		t.Error("there is no IFB for 78")
	}
}
