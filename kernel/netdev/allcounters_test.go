package netdev_test

import (
	"errors"
	"net"
	"testing"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

var must = testkit.Must

func TestAllCounters(t *testing.T) {
	testkit.OnKernels(t)
	kit := testkit.NetNS(t)
	ns, err := netdev.Open(kit.Path)
	must(t, err)
	defer ns.Close()
	again, err := ns.Counting()
	must(t, err)
	defer again.Close()
	read := func() netdev.Counters {
		t.Helper()
		counts, err := ns.AllCounters(netdev.MostLinks)
		must(t, err)
		if same, err := again.Read(netdev.MostLinks); err != nil || same[1] != counts[1] {
			t.Fatalf("%+v, %v over a socket that stays, %+v over another", same[1], err, counts[1])
		}
		return counts[1]
	}
	before := read()
	const packets, payload = 3, 100
	if err := ns.Do(func() error {
		c, err := net.Dial("udp", "127.0.0.1:9")
		if err != nil {
			return err
		}
		defer c.Close()
		for range packets { // nobody listens: later ones return the ICMP error of earlier ones
			c.Write(make([]byte, payload))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	after := read()
	if got := after.TxPackets - before.TxPackets; got < packets {
		t.Errorf("%d packets sent, want %d or more", got, packets)
	}
	if got := after.RxBytes - before.RxBytes; got < packets*payload {
		t.Errorf("%d bytes received, want %d or more", got, packets*payload)
	}
	if _, err := ns.AllCounters(0); !errors.Is(err, netdev.ErrMany) {
		t.Errorf("most 0: %v, want ErrMany", err)
	}
}
