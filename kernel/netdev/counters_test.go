package netdev_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead-project/fairlead/internal/testkit"
	"github.com/fairlead-project/fairlead/kernel/netdev"
)

// packets sends n frames of so many bytes, header included, by a device.
func packets(t *testing.T, from *netdev.NS, index, n, size int) {
	t.Helper()
	if err := from.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for range n {
			if err := unix.Sendto(fd, make([]byte, size), 0, &unix.SockaddrLinklayer{Ifindex: index}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// What passes a veth is counted at its other end, to the byte.
func TestCounters(t *testing.T) {
	testkit.OnKernels(t)
	testkit.NeedRoot(t)
	a, b := testkit.NetNS(t), testkit.NetNS(t)
	testkit.Veth(t, a, "h0", b, "eth0")
	p := pair{host: openNS(t, a.Path), inside: openNS(t, b.Path)}
	p.h0, p.eth0 = index(t, p.host, "h0"), index(t, p.inside, "eth0")
	const size, n = 1000, 50
	read := func() netdev.Counters {
		t.Helper()
		all, err := p.host.AllCounters(netdev.MostLinks)
		must(t, err)
		return all[p.h0]
	}
	was := read()
	packets(t, p.inside, p.eth0, n, size)
	packets(t, p.host, p.h0, 2*n, size)
	now := read()
	if got, sent := now.RxBytes-was.RxBytes, now.TxBytes-was.TxBytes; got < n*size || sent < 2*n*size || got > n*size+10000 || sent > 2*n*size+10000 { // and IPv6's own
		t.Errorf("%d bytes received and %d sent, want %d and %d", got, sent, n*size, 2*n*size)
	}
}
